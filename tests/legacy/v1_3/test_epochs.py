"""The ends of epochs in generations 1.x: the order of the hooks, the counters, and what a resumed run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.legacy import v1_1
from drivetrain.legacy import v1_3 as pl
from drivetrain.legacy.v1_1 import _callbacks as earlier
from drivetrain.legacy.v1_3 import _callbacks as later

from .test_trainer import Net, loader, quiet


class Watched(Net):
    """Notes its hooks, with the step and the epoch that the Trainer answers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def note(self, name: str) -> None:
        assert (self.global_step, self.current_epoch) == (self.trainer.global_step, self.trainer.current_epoch)
        if not self.trainer.sanity_checking:
            self.seen.append((name, self.trainer.global_step, self.trainer.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("step")
        loss = super().training_step(batch, batch_idx)
        self.log("loss_of_epoch", loss, on_epoch=True, on_step=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.note("batch end")

    def training_epoch_end(self, outputs: Any) -> None:
        assert len(outputs) == 2
        self.note("training_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")

    def on_validation_start(self) -> None:
        self.note("validation")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean())

    def val_dataloader(self) -> DataLoader[Any]:
        return loader()

    def on_train_end(self) -> None:
        self.note("on_train_end")


EPOCH = [
    ("step", 0), ("batch end", 0), ("step", 1), ("batch end", 1), ("training_epoch_end", 1), ("on_train_epoch_end", 1),
    ("validation", 1),
]  # fmt: skip


def epoch(number: int) -> list[tuple[str, int, int]]:
    return [(name, step + 2 * number, number) for name, step in EPOCH]


def test_an_epoch_ends_before_its_validation_and_its_last_step_counts_afterwards() -> None:
    model, trainer = Watched(), quiet(max_epochs=2)
    trainer.fit(model, loader())
    assert model.seen == [*epoch(0), *epoch(1), ("on_train_end", 4, 1)]
    assert (trainer.global_step, trainer.current_epoch) == (4, 1)
    model.seen.clear()
    trainer.validate(model, loader(), verbose=False)
    assert model.seen == [("validation", 4, 1)]


def test_a_validation_inside_an_epoch_stays_where_it_is() -> None:
    model = Watched()
    quiet(val_check_interval=1).fit(model, loader())
    assert [name for name, *_ in model.seen] == [
        "step", "batch end", "validation", "step", "batch end", "training_epoch_end", "on_train_epoch_end",
        "validation", "on_train_end",
    ]  # fmt: skip
    assert model.seen[2] == ("validation", 0, 0)


def test_a_run_that_is_asked_to_stop_validates_behind_its_last_epoch() -> None:
    class Stops(Watched):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.trainer.should_stop = True

        def training_epoch_end(self, outputs: Any) -> None:
            self.note("training_epoch_end")

    model = Stops()
    quiet(max_epochs=3).fit(model, loader())
    assert [name for name, *_ in model.seen] == [
        "step", "training_epoch_end", "on_train_epoch_end", "validation", "on_train_end",
    ]  # fmt: skip


def test_batches_are_counted_over_all_epochs() -> None:
    class Counts(Watched):
        def note(self, name: str) -> None:
            if not self.trainer.sanity_checking:
                self.seen.append((name, self.trainer.batch_idx, self.trainer.total_batch_idx))

        def on_train_start(self) -> None:
            self.note("start")

    model, trainer = Counts(), quiet(max_epochs=2)
    trainer.fit(model, loader())
    first = [("step", 0, 0), ("batch end", 0, 0), ("step", 1, 1), ("batch end", 1, 1)]
    ends = ("training_epoch_end", "on_train_epoch_end", "validation")
    both = [*first, *((name, 1, 2) for name in ends), *((name, idx, all + 2) for name, idx, all in first)]
    assert model.seen == [("start", 0, 0), *both, *((name, 1, 4) for name in (*ends, "on_train_end"))]
    assert (trainer.batch_idx, trainer.total_batch_idx) == (1, 4)


class SavesAt(Callback):
    """Saves in one hook of the first epoch, and ends the run there."""

    def __init__(self, hook: str, path: Path) -> None:
        self.path = path
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("hook", "again"),
    [
        ("on_train_epoch_end", EPOCH[-1:]),
        ("on_validation_start", EPOCH[-1:]),
        ("on_validation_batch_end", EPOCH[-1:]),
        ("on_validation_end", []),
    ],
)
def test_a_resumed_run_ends_no_epoch_twice(hook: str, again: list[Any], tmp_path: Path) -> None:
    whole, path = Watched(), tmp_path / "first.ckpt"
    quiet(max_epochs=2, callbacks=[SavesAt(hook, path)]).fit(whole, loader())
    model = Watched()
    trainer = quiet(max_epochs=2, resume_from_checkpoint=str(path), num_sanity_val_steps=0)
    trainer.fit(model, loader())
    assert model.seen == [*((name, step, 0) for name, step in again), *epoch(1), ("on_train_end", 4, 1)]
    assert torch.equal(model.net.weight, whole.net.weight)


@pytest.mark.parametrize(
    ("generation", "checkpoint_class"), [(pl, later.ModelCheckpoint), (v1_1, earlier.ModelCheckpoint)]
)
def test_checkpoints_are_saved_after_the_validation_and_named_as_then(
    generation: Any, checkpoint_class: Any, tmp_path: Path
) -> None:
    checkpoint = checkpoint_class(dirpath=str(tmp_path), monitor="val_loss", save_top_k=-1)
    trainer = generation.Trainer(
        max_epochs=2, logger=False, callbacks=[checkpoint], enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Watched(), loader())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=1.ckpt", "epoch=1-step=3.ckpt"]


@pytest.mark.parametrize("checkpoint_class", [later.ModelCheckpoint, earlier.ModelCheckpoint])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((3, 7, {"loss": 1}, 2), {}),
        ((3, {"loss": 1, "step": 7}, 2), {}),
        (({"loss": 1, "epoch": 3, "step": 7}, 2), {}),
        (({"loss": 1, "epoch": 3, "step": 7}, None, 2), {}),
        ((), {"epoch": 3, "step": 7, "metrics": {"loss": 1}, "ver": 2}),
        ((3,), {"metrics": {"loss": 1, "step": 7}, "ver": 2}),
    ],
)
def test_a_checkpoints_name_is_made_with_the_arguments_of_then(
    checkpoint_class: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    checkpoint = checkpoint_class(filename="{epoch}-{step}-{loss}")
    assert checkpoint.format_checkpoint_name(*args, **kwargs) == "epoch=3-step=7-loss=1-v2.ckpt"


def test_an_override_of_then_calls_its_base_with_the_arguments_of_then(tmp_path: Path) -> None:
    class Own(earlier.ModelCheckpoint):
        def format_checkpoint_name(self, epoch: int, metrics: Any, ver: Any = None) -> str:
            assert isinstance(epoch, int)
            return str(super().format_checkpoint_name(epoch, metrics, ver)).replace("epoch", "e")

    for _ in range(2):
        checkpoint = Own(dirpath=str(tmp_path), filename="{epoch}", monitor="val_loss", save_top_k=-1)
        v1_1.Trainer(
            max_epochs=1, logger=False, callbacks=[checkpoint], enable_progress_bar=False, enable_model_summary=False
        ).fit(Watched(), loader())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e=0-v1.ckpt", "e=0.ckpt"]
