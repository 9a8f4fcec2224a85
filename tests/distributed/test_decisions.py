"""What is decided by a value is decided alike on all ranks (traps T5, T25)."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import DrivetrainError
from drivetrain.loggers import CSVLogger
from drivetrain.loops.goodput import read
from drivetrain.strategies import DDPStrategy

VALUES = ((5.0, 4.0, 3.0, 2.0, 1.0), (1.0, 2.0, 3.0, 4.0, 5.0))  # of rank 0 and of rank 1, by epoch


class Judged(LightningModule):
    """Logs a value of its own on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", VALUES[self.global_rank][self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(folder: Path, patience: int, strategy: Any = "auto", module: Any = None) -> tuple[Trainer, Any]:
    warnings.filterwarnings("ignore", "value: logged without sync_dist")  # which is what is tried here
    saver, stopper = (
        ModelCheckpoint(folder / "c", "{epoch}", monitor="value"),
        EarlyStopping("value", patience=patience),
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=5, callbacks=[saver, stopper],
        default_root_dir=folder, logger=CSVLogger(folder), enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    loader: Any = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    module = module or Judged()
    trainer.fit(module, loader, loader if module.validation_step else None)
    return trainer, (saver.best_model_path, saver.best_model_score)


def decided(folder: Path, patience: int) -> Any:
    trainer, (path, score) = fitted(folder, patience)
    return trainer.current_epoch, float(trainer.callback_metrics["value"]), os.path.basename(path), float(score)


def test_t5_each_rank_keeps_its_own_value_and_files_are_ranked_by_rank_zeros(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(decided, tmp_path, 100, group=False)
    assert (first[1], second[1]) == (1.0, 5.0)
    assert first[2:] == second[2:] == ("epoch=4.ckpt", 1.0)
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert [float(line.split(",")[lines[0].split(",").index("value")]) for line in lines[1:]] == list(VALUES[0])
    assert len(list(tmp_path.rglob("metrics.csv"))) == 1


def test_t5_a_rank_that_wants_to_stop_stops_all(pool: Any, tmp_path: Path) -> None:
    """On rank 1 the value gets worse from the beginning, and on rank 0 never."""
    first, second = pool.run(decided, tmp_path, 2, group=False)
    assert first[0] == second[0] == 3


class Late(TorchCheckpointIO):
    """Writes when somebody waits, and says so."""

    def __init__(self) -> None:
        self.later: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.later[str(path)] = checkpoint

    def is_durable(self, path: Any) -> bool:
        return str(path) not in self.later

    def wait(self, path: Any = None) -> None:
        for name in list(self.later) if path is None else [str(path)]:
            if (checkpoint := self.later.pop(name, None)) is not None:
                super().save_checkpoint(checkpoint, name)


def saved_late(folder: Path, weights_only: bool) -> list[str]:
    """The best file in each epoch, and in the end."""
    seen = []

    class Looks(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            seen.append(os.path.basename(saver.best_model_path))
            trainer.strategy.barrier()
            assert not saver.best_model_path or os.path.exists(saver.best_model_path)

    saver = ModelCheckpoint(folder / "c", "{epoch}", save_last="link", save_weights_only=weights_only)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=4, callbacks=[Looks(), saver], plugins=[Late()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    loader: Any = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    trainer.fit(JudgedAtTheEnd(), loader)
    return [*seen, os.path.basename(saver.best_model_path)]


@pytest.mark.parametrize(
    ("weights_only", "late"), [(True, 1), (False, 0)], ids=["of one file", "with files of the other ranks, which wait"]
)
def test_t5_all_ranks_learn_at_the_same_time_that_a_file_is_durable(
    pool: Any, tmp_path: Path, weights_only: bool, late: int
) -> None:
    first, second = pool.run(saved_late, tmp_path, weights_only, group=False)
    best = ["", *(f"epoch={epoch}.ckpt" for epoch in range(4))]
    assert first == second == ([""] * late + best)[:4] + best[-1:]
    assert sorted(path.name for path in (tmp_path / "c").glob("*.ckpt")) == ["epoch=3.ckpt", "last.ckpt"]


class JudgedAtTheEnd(Judged):
    """Logs its value where a training epoch ends, for all ranks together."""

    validation_step = None

    def on_train_epoch_end(self) -> None:
        self.log("value", VALUES[self.global_rank][self.current_epoch] * (1 + self.global_rank), sync_dist=True)


def judged_at_the_end(folder: Path) -> Any:
    _, (path, score) = fitted(folder, 100, module=JudgedAtTheEnd())
    return os.path.basename(path), float(score)


def test_t5_savers_see_what_the_ranks_logged_together_in_the_same_hook(pool: Any, tmp_path: Path) -> None:
    assert pool.run(judged_at_the_end, tmp_path, group=False) == [("epoch=0.ckpt", 3.5)] * 2  # (5 + 2 * 1) / 2


def saved(folder: Path, on_all: bool) -> str:
    trainer, _ = fitted(folder, 100, DDPStrategy(timeout=timedelta(seconds=2)))
    try:
        if on_all or trainer.is_global_zero:
            trainer.save_checkpoint(folder / "mine.ckpt")
    except DrivetrainError as error:
        return str(error)
    return "saved" if (folder / "mine.ckpt").exists() else "not there"


def test_t25_every_rank_saves_and_the_file_is_there_when_it_is_done(pool: Any, tmp_path: Path) -> None:
    assert pool.run(saved, tmp_path, True, group=False) == ["saved", "saved"]


def test_t25_saving_on_rank_zero_alone_is_an_error_and_no_hang(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(saved, tmp_path, False, group=False)
    assert "not all came" in first
    assert "Make this call on every rank" in first
    assert second == "not there"


def saved_by_the_ledger(folder: Path) -> tuple[list[int], float | None]:
    class Steps(Callback):
        def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
            saved_at.append(trainer.global_step)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_rank:  # a clock that says that hours have passed
                auto._saved_at_time -= 10_000.0

    saved_at: list[int] = []
    auto = ModelCheckpoint(folder, every="auto")
    trainer = Trainer(
        accelerator="cpu", devices=2, max_steps=4, callbacks=[auto, Steps()], default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(Judged(), DataLoader(TensorDataset(torch.arange(32.0).reshape(16, 2)), batch_size=2))
    trainer.strategy.barrier("rank 0 has written the last lines of its ledger")
    return saved_at, trainer.goodput


def test_t5_rank_zeros_ledger_decides_for_all_when_to_save(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(saved_by_the_ledger, tmp_path, group=False)
    assert first[0] == second[0]
    assert first[1] == second[1] > 0
    runs = {each["run"] for each in read(tmp_path / "ledger.jsonl")[0]}
    assert len(runs) == 1


def sampled() -> Any:
    trainer = Trainer(accelerator="cpu", devices=2)
    return trainer.distributed_sampler_kwargs, trainer.world_size, trainer.global_rank


@pytest.mark.parametrize("world_size", [2])
def test_s3_25_how_data_are_shared_is_said(pool: Any, world_size: int) -> None:
    found = pool.run(sampled, world_size=world_size)
    assert found == [({"num_replicas": 2, "rank": rank}, 2, rank) for rank in range(2)]


class Own(Judged):
    """Logs values of its own and shared ones; ``alike``: those of its own are equal."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        own = 0 if self.alike else self.global_rank
        self.log("own", float(own))
        self.log("shared", float(self.global_rank), sync_dist=True)
        self.log("rank_zero", 1.0, rank_zero_only=True)


def warned(folder: Path, alike: bool) -> list[str]:
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=2, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer.fit(Own(alike), loader, loader)
    return [str(each.message) for each in record if "sync_dist" in str(each.message)]


def test_t5_values_of_a_rank_of_its_own_are_warned_of_once(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(warned, tmp_path, False, group=False)
    [message] = first
    assert message.startswith("own: logged without sync_dist")
    assert "0, 1" in message
    assert second == []
    assert pool.run(warned, tmp_path, True, group=False) == [[], []]  # nothing is said where all ranks have the same


class Numbers(IterableDataset[Any]):
    """Numbers from ``first`` on, of which no rank knows that there are others."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Any:
        return iter(torch.arange(float(self.first), self.first + 8).reshape(4, 2))


class Masked(Numbers):
    """The numbers behind a mask, which is the same on all ranks, and a tensor without values."""

    def __iter__(self) -> Any:
        return ((torch.ones(2), torch.empty(0), numbers) for numbers in super().__iter__())


def told_of_samples(folder: Path, divides: bool, validates: bool, kind: type[Numbers] = Numbers) -> list[str]:
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=2, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, limit_train_batches=2,
    )  # fmt: skip
    loader = DataLoader(kind(trainer.global_rank * 100 if divides else 0), batch_size=2)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer.fit(Judged(), loader, loader if validates else None)
    return [str(each.message) for each in record if "trained on the same batch" in str(each.message)]


@pytest.mark.parametrize("validates", [False, True])
def test_ranks_that_train_on_the_same_samples_are_told_so(pool: Any, tmp_path: Path, validates: bool) -> None:
    first, second = pool.run(told_of_samples, tmp_path, False, validates, group=False)
    assert len(first) == 1
    assert second == []
    assert pool.run(told_of_samples, tmp_path, True, validates, group=False) == [[], []]


@pytest.mark.parametrize(("divides", "told"), [(True, 0), (False, 1)])
def test_what_is_the_same_in_every_batch_says_nothing_of_the_samples(
    pool: Any, tmp_path: Path, divides: bool, told: int
) -> None:
    first, second = pool.run(told_of_samples, tmp_path, divides, False, Masked, group=False)
    assert (len(first), second) == (told, [])
