"""Checkpoints of every kind, for the tests of ``drivetrain checkpoint``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import json_tree, sharded
from drivetrain.cli.command import main
from drivetrain.strategies.sharded_files import TensorNames

DATA = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


class CheckedNet(LightningModule):
    """Tied weights, and buffers of every form: without dimensions, empty, not contiguous, of 16 bits."""

    def __init__(self, width: int = 6, folder: Path | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 4)
        self.again = nn.Linear(4, width)
        self.again.weight = self.first.weight
        self.register_buffer("number", torch.tensor(2.5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("small", torch.tensor([1.0, float("nan"), -0.0]).bfloat16())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.again(self.last(self.first(batch)))).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def quiet(**arguments: Any) -> Trainer:
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(accelerator="cpu", devices=1, **shown, **arguments)


def trained(folder: Path, **arguments: Any) -> Path:
    """A checkpoint from after the second epoch, and ModelCheckpoint's in ``folder / "runs"``."""
    trainer = quiet(**{"max_epochs": 2, "callbacks": [ModelCheckpoint(folder / "runs")], **arguments})
    trainer.fit(CheckedNet(folder=Path("somewhere")), DATA)
    trainer.save_checkpoint(folder / "model.ckpt")
    return folder / "model.ckpt"


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def shards_of(checkpoint: dict[str, Any], folder: Path, ranks: int = 2) -> Path:
    """The folder into which ``ranks`` processes of FSDP save ``checkpoint``: rows of weights and optimizer states."""
    names = TensorNames(checkpoint)
    tree = json_tree.encode(dict(checkpoint), names.of)
    sharded.prepare(folder, new=True)
    everyones = []
    for rank in range(ranks):
        parts: list[Any] = []
        for name, tensor in names.tensors.items():
            whole = tuple(tensor.shape)
            if name.startswith(("model.", "optimizers.")) and tensor.ndim and tensor.numel():
                share = -(-len(tensor) // ranks)
                rows = tensor[rank * share : (rank + 1) * share]
                at = (rank * share, *(0,) * (tensor.ndim - 1))
                parts += [(name, rows, whole, (at, tuple(rows.shape)))] if rows.numel() else []
            elif rank == 0:
                parts.append((name, tensor, whole, ((0,) * tensor.ndim, whole)))
        everyones.append(sharded.write_tensors(folder, f"0000000a.rank{rank}.bin", parts))
    everyones[0].tensors |= {**sharded.entries_of(names.tensors), **everyones[0].tensors}
    sharded.commit(folder, "0000000a", tree, everyones)
    return folder


def run(capsys: Any, *arguments: str | Path) -> tuple[int, str, str]:
    """The exit code of a command, and what it has printed."""
    code = main(["checkpoint", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def answer(capsys: Any, *arguments: str | Path) -> dict[str, Any]:
    """What a command prints for programs."""
    _, out, _ = run(capsys, *arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    return found


def flipped(path: Path, content: bytes) -> Path:
    """Change one bit of the file ``path`` inside ``content``, which it contains."""
    whole = bytearray(path.read_bytes())
    at = whole.find(content)
    assert at >= 0
    whole[at + len(content) // 2] ^= 1
    path.write_bytes(whole)
    return path


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
