"""Train on a loader with a state of its own, on some ranks, and resume on others: what each rank was given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import Callback
from drivetrain.errors import CheckpointError

SAMPLES, GLOBAL_BATCH = 96, 12
EVERY = [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]
"""Each sample of each epoch once."""

Given = list[tuple[int, list[int]]]
"""For each batch of a rank its epoch, and the numbers of its samples."""


class Numbered(LightningModule):
    """Learns from numbered samples: batches of ``{"x": ..., "number": ...}``."""

    def __init__(self, make: Callable[[int], Any], size: int) -> None:
        super().__init__()
        self.net, self.make, self.size = nn.Linear(1, 1), make, size
        self.given: Given = []

    def train_dataloader(self) -> Any:
        return self.make(self.size // int(os.environ.get("WORLD_SIZE", 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.current_run.window.factor_here:  # else the rank repeats a batch, because it has no other
            self.given.append((self.current_epoch, batch["number"].flatten().tolist()))
        loss: Tensor = (self.net(batch["number"].reshape(-1, 1) / 100) - 1).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Saves(Callback):
    """Saves after some batches of the second epoch, or at its end; what follows is not counted."""

    def __init__(self, path: Path, after: int | None) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            self.given = list(module.given)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1 and self.after is None:
            trainer.save_checkpoint(self.path)
            self.given = list(module.given)


def trained(
    make: Callable[[int], Any],
    size: int,
    saves: Path | None = None,
    after: int | None = None,
    resumes: Path | None = None,
) -> tuple[Given, Tensor]:
    """Fit three epochs with ``size`` samples in a global batch: what this rank was given, and the weights."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(3)
    callback = Saves(saves, after) if saves else None
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", precision="64-true",
        max_epochs=2 if saves else 3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callback,
    )  # fmt: skip
    module = Numbered(make, size)
    trainer.fit(module, ckpt_path=resumes)
    weights = nn.utils.parameters_to_vector(module.parameters()).detach()
    return callback.given if callback else module.given, weights


def on(pool: Any, ranks: int, *arguments: Any) -> list[tuple[Given, Tensor]]:
    """The results of :func:`trained` on each of so many ranks."""
    return [trained(*arguments)] if ranks == 1 else list(pool.run(trained, *arguments, world_size=ranks, group=False))


def batches(*runs: list[tuple[Given, Tensor]]) -> list[tuple[int, list[int]]]:
    """The epoch and the sorted samples of each global batch that the ranks of these runs were given, in order."""
    return [
        (parts[0][0], sorted(number for _, numbers in parts for number in numbers))
        for run in runs
        for parts in zip(*(given for given, _ in run), strict=True)
    ]


def samples(*runs: list[tuple[Given, Tensor]]) -> list[tuple[int, int]]:
    """The epoch and the number of each sample that the ranks of these runs were given, sorted."""
    return sorted((epoch, number) for run in runs for given, _ in run for epoch, numbers in given for number in numbers)


# ---- a stream without a state of its own, which is read again up to the position -------------------------------------


class Counted(IterableDataset[Any]):
    """Adds the number of this rank's samples, without which several ranks have to fetch ahead."""

    def __init__(self, data: Any) -> None:
        self.data = data
        for name in ("set_epoch", "state_dict", "load_state_dict"):
            if hasattr(data, name):
                setattr(self, name, getattr(data, name))

    def __len__(self) -> int:
        return SAMPLES // int(os.environ.get("WORLD_SIZE", 1))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def workers_of(number: int) -> dict[str, Any]:
    """The arguments of a DataLoader with so many workers."""
    return {"num_workers": number, "multiprocessing_context": "fork"} if number else {}


AFTER = pytest.mark.parametrize("after", [3, None], ids=["inside an epoch", "at its end"])


def check_resumes_exactly(
    pool: Any, ranks: int, make: Callable[[int], Any], path: Path, after: int | None, is_shuffled: bool = True
) -> None:
    """A fit that resumes on as many ranks gets the batches of an undisturbed one, and comes to its weights."""
    whole = on(pool, ranks, make, GLOBAL_BATCH)
    first = on(pool, ranks, make, GLOBAL_BATCH, path, after)
    rest = on(pool, ranks, make, GLOBAL_BATCH, None, None, path)
    assert batches(first, rest) == batches(whole)
    assert samples(whole) == EVERY
    orders = {str([numbers for each, numbers in batches(whole) if each == epoch]) for epoch in range(3)}
    assert len(orders) == 3 or not is_shuffled  # in another way in each epoch
    torch.testing.assert_close(rest[0][1], whole[0][1], rtol=1e-12, atol=1e-12)


def check_what_needs_the_end_of_an_epoch(
    pool: Any, counted: Callable[[int], Any], endless: Callable[[int], Any], folder: Path
) -> None:
    """Inside an epoch, other ranks are refused, and several ranks without a length; at its end they resume."""
    inside, end = folder / "inside.ckpt", folder / "end.ckpt"
    on(pool, 2, counted, GLOBAL_BATCH, inside, 3)
    with pytest.raises(CheckpointError, match="by 2 processes, and there are 1: its position in the data counts"):
        on(pool, 1, counted, GLOBAL_BATCH, None, None, inside)
    on(pool, 2, endless, GLOBAL_BATCH, inside, 3)
    with pytest.raises(CheckpointError, match="one of several processes whose loader has no length"):
        on(pool, 2, endless, GLOBAL_BATCH, None, None, inside)
    first = on(pool, 2, endless, GLOBAL_BATCH, end, None)
    assert samples(first, on(pool, 1, endless, GLOBAL_BATCH, None, None, end)) == EVERY
