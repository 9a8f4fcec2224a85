"""Checkpoints, replays and proofs of programs on a real CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer, seed_everything
from drivetrain.accelerators import CUDAAccelerator
from drivetrain.callbacks import OnExceptionCheckpoint, WeightAveraging
from drivetrain.plugins import AsyncCheckpointIO

pytestmark = pytest.mark.skipif(
    not CUDAAccelerator.is_available(), reason=f"no CUDA device: {CUDAAccelerator.why_unavailable()}"
)


class Net(LightningModule):
    """Draws on the device in each step."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x + torch.randn_like(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]


class SavesAt(Callback):
    """Saves after the step ``at``, and stops there or lets the run go on, which changes every weight."""

    def __init__(self, path: Path, at: int, stops: bool = False) -> None:
        self.path, self.at, self.stops, self.saved = path, at, stops, False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.at and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)
            if self.stops:
                raise RuntimeError("planted")


def fit(folder: Path, module: Net, ckpt_path: Any = None, batch: int = 8, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(324, 16, generator=generator), torch.randn(324, 1, generator=generator))
    seed_everything(2)
    callbacks = [WeightAveraging(), *arguments.pop("callbacks", [])]
    saves = any(isinstance(each, OnExceptionCheckpoint) for each in callbacks)
    trainer = Trainer(
        accelerator="cuda", devices=1, max_epochs=3, default_root_dir=folder, logger=False, callbacks=callbacks,
        enable_progress_bar=False, enable_checkpointing=saves, accumulate_grad_batches=2, gradient_clip_val=1.0,
        **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=batch, shuffle=True), ckpt_path=ckpt_path)
    return trainer


def state(module: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true"])
def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(precision: Any, tmp_path: Path) -> None:
    whole, first, second = Net(), Net(), Net()
    undisturbed = fit(tmp_path, whole, precision=precision)
    path = tmp_path / "middle.ckpt"
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, first, precision=precision, callbacks=[SavesAt(path, 25, stops=True)])
    resumed = fit(tmp_path, second, path, precision=precision)
    assert resumed.global_step == undisturbed.global_step > 60
    assert all(map(torch.equal, state(whole), state(second)))
    assert not all(map(torch.equal, state(whole), state(first)))  # the control


def test_a_background_save_holds_the_state_of_its_step(tmp_path: Path) -> None:
    """Copies to the host are complete before the next step changes the weights: 250 MB take a while."""
    saved = {}
    for name, plugins in {"at once": [], "background": [AsyncCheckpointIO()]}.items():
        path = tmp_path / f"{name}.ckpt"
        earlier = SavesAt(tmp_path / "earlier.ckpt", 20)  # the second save copies into memory that is locked by then
        fit(tmp_path, Net(1_000_000), callbacks=[earlier, SavesAt(path, 25)], plugins=plugins)
        saved[name] = torch.load(path, map_location="cpu", weights_only=True)
    one, other = saved.values()
    assert all(map(torch.equal, one["state_dict"].values(), other["state_dict"].values()))
    for mine, theirs in zip(*(each["optimizer_states"][0]["state"].values() for each in (one, other)), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_what_is_saved_after_an_exception_resumes_to_the_same_bits(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 30:
                raise RuntimeError("planted")

    whole, second = Net(), Net()
    fit(tmp_path, whole)
    with pytest.raises(RuntimeError, match="planted"):
        fit(tmp_path, Net(), callbacks=[Fails(), OnExceptionCheckpoint(tmp_path)])
    fit(tmp_path, second, tmp_path / "on_exception.ckpt")
    assert all(map(torch.equal, state(whole), state(second)))


def test_a_replay_names_an_operation_that_adds_in_another_order(tmp_path: Path) -> None:
    class Scatters(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _ = batch
            rows = self.net(x).squeeze(1)
            index = torch.arange(2**20, device=self.device) % 7
            values = rows.repeat(2**20 // len(rows) + 1)[: 2**20] * torch.linspace(0, 1, 2**20, device=self.device)
            total = torch.zeros(7, device=self.device).index_add(0, index, values)  # atomic additions
            return total.square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(tmp_path, Net(), replay_every=5)  # the control
    with pytest.warns(UserWarning, match="is not deterministic|gave other results") as found:
        fit(tmp_path, Scatters(), replay_every=5)
    assert any("index_add" in str(each.message) for each in found)


def test_prove_resume_says_of_a_program_on_the_device_that_it_resumes(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, TensorDataset
            from drivetrain import LightningModule, Trainer, seed_everything
            from drivetrain.callbacks import ModelCheckpoint

            class Net(LightningModule):
                def __init__(self):
                    super().__init__()
                    self.net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 1))

                def training_step(self, batch, batch_idx):
                    return nn.functional.mse_loss(self.net(batch[0]), batch[1])

                def configure_optimizers(self):
                    return torch.optim.AdamW(self.parameters())

            seed_everything(1)
            data = TensorDataset(torch.randn(320, 16), torch.randn(320, 1))
            saves = ModelCheckpoint(dirpath="saved", every_n_train_steps=5, save_last=True)
            trainer = Trainer(accelerator="cuda", devices=1, max_epochs=3, logger=False, callbacks=[saves])
            trainer.fit(Net(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path="last")
            """
        )
    )
    start = "import sys; from drivetrain.cli.command import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "prove-resume", "--kills", "2", "--folder", "runs", program.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
