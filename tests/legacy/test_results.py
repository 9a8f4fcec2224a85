"""What generations 1.x made of logged values: names per step and per epoch, and the checkpoint that was the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Callback
from drivetrain.callbacks import EarlyStopping
from drivetrain.legacy import v1_1, v1_3
from drivetrain.legacy.v1_1 import _callbacks as earlier
from drivetrain.legacy.v1_3 import _callbacks as later

from .conftest import loader, model_of, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CHECKPOINT = {v1_1: earlier.ModelCheckpoint, v1_3: later.ModelCheckpoint}


def floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


# ---- a name that is logged per step and per epoch --------------------------------------------------------------------


def logs(self: Any, batch: Any, batch_idx: int) -> Any:
    count = batch_idx + 1.0 + 3 * self.trainer.current_epoch
    self.log("both", count, on_step=True, on_epoch=True)
    return self.weight.sum()


class Sees(Callback):
    """Keeps what callbacks see."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, float]]] = {"batch": [], "epoch": [], "validation": []}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen["batch"].append(floats(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.seen["epoch"].append(floats(trainer.callback_metrics))

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self.seen["validation"].append(floats(trainer.callback_metrics))


def test_a_name_per_step_and_per_epoch_is_the_last_step(pl: Any) -> None:
    def validates(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val", batch_idx + 1.0, on_step=True, on_epoch=True)

    sees, trainer = Sees(), trainer_of(pl)
    trainer.callbacks.append(sees)
    trainer.fit(model_of(pl, training_step=logs, validation_step=validates), loader(), loader())
    first = {"both": 3.0, "both_step": 3.0, "both_epoch": 2.0}
    second = {"both": 6.0, "both_step": 6.0, "both_epoch": 5.0}
    validated = {"val": 3.0, "val_epoch": 2.0}
    assert sees.seen["epoch"] == [first, {**second, **validated}]
    assert sees.seen["validation"] == [{**first, **validated}, {**second, **validated}]
    assert [seen.get("both") for seen in sees.seen["batch"]] == [None, None, None, 3.0, 3.0, 3.0]
    assert floats(trainer.callback_metrics) == {**second, **validated}


def test_an_evaluation_returns_the_last_step_too(pl: Any) -> None:
    def evaluates(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("own", batch_idx + 1.0, on_step=True, on_epoch=True)
        self.log("mean", batch_idx + 1.0)

    model = model_of(pl, test_step=evaluates, validation_step=evaluates)
    expected = {"own": 3.0, "own_epoch": 2.0, "mean": 2.0}
    assert trainer_of(pl).test(model, test_dataloaders=loader(), verbose=False) == [expected]
    if pl is v1_3:
        assert trainer_of(pl).validate(model, val_dataloaders=loader(), verbose=False) == [expected]
    [one, other] = trainer_of(pl).test(model, test_dataloaders=[loader(), loader(4)], verbose=False)
    assert one["own/dataloader_idx_0"] == 3.0
    assert (other["own/dataloader_idx_1"], other["own_epoch/dataloader_idx_1"]) == (4.0, 2.5)


def test_a_metric_object_per_step_and_per_epoch_is_what_it_has_computed(pl: Any) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def updates(self: Any, batch: Any, batch_idx: int) -> Any:
        self.trainer.mean_so_far(torch.tensor(batch_idx + 1.0))
        self.log("both", self.trainer.mean_so_far, on_step=True, on_epoch=True)
        return self.weight.sum()

    trainer = trainer_of(pl, max_epochs=1)
    trainer.mean_so_far = torchmetrics.MeanMetric()
    trainer.fit(model_of(pl, training_step=updates), loader())
    assert floats(trainer.callback_metrics) == {"both": 2.0, "both_step": 3.0, "both_epoch": 2.0}


def test_callbacks_watch_the_last_step(pl: Any) -> None:
    """The mean over the epoch falls from 2 to 1.5 to 1, the last step rises."""

    def watched(self: Any, batch: Any, batch_idx: int) -> None:
        value = [[3.0, 1.0], [1.0, 2.0], [-1.0, 3.0]][self.current_epoch][batch_idx]
        self.log("val", value, on_step=True, on_epoch=True)

    trainer = trainer_of(pl, max_epochs=3, callbacks=[EarlyStopping("val", patience=1)])
    trainer.fit(model_of(pl, validation_step=watched), loader(), loader(2))
    assert trainer.current_epoch == 1


# ---- a ModelCheckpoint without monitor -------------------------------------------------------------------------------


def scores(*names: str) -> Any:
    """A ``validation_step`` that logs 5, 1 and 3 in the three epochs."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        for name in names:
            self.log(name, [5.0, 1.0, 3.0][self.current_epoch])

    return validation_step


def logs_weight(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("weight", self.weight.item())


def after_a_test(pl: Any, folder: Path, **members: Any) -> tuple[Any, float]:
    """The Trainer of a program that names no checkpoint, after three epochs, and the weight that it has tested."""
    trainer = trainer_of(pl, max_epochs=3, checkpoint_callback=True, default_root_dir=str(folder))
    trainer.fit(model_of(pl, test_step=logs_weight, **members), loader(1), loader(1))
    [result] = trainer.test(test_dataloaders=loader(1), verbose=False)
    return trainer, result["weight"]


@pytest.mark.parametrize(
    ("generation", "names", "weight"),
    [
        (v1_3, ("val_loss",), -2.0),
        (v1_1, ("val_loss",), -2.0),
        (v1_1, ("checkpoint_on",), -2.0),
        (v1_3, ("checkpoint_on",), -3.0),
        (v1_3, ("loss_of_mine",), -3.0),
        (v1_1, ("loss_of_mine",), -3.0),
    ],
)
def test_without_monitor_the_best_val_loss_is_kept_and_tested(
    generation: Any, names: tuple[str, ...], weight: float, tmp_path: Path
) -> None:
    trainer, found = after_a_test(generation, tmp_path, validation_step=scores(*names))
    assert found == weight
    callback = trainer.checkpoint_callback
    assert type(callback) is CHECKPOINT[generation]
    assert callback.monitor == (names[0] if weight == -2.0 else None)
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


def test_val_loss_ranks_from_the_first_save_on_that_has_it(pl: Any, tmp_path: Path) -> None:
    def late(self: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            self.log("val_loss", [5.0, 1.0, 3.0][self.current_epoch])

    trainer, weight = after_a_test(pl, tmp_path, validation_step=late)
    assert weight == -2.0
    assert [Path(path).name for path in trainer.checkpoint_callback.best_k_models] == ["epoch=1-step=1.ckpt"]
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["epoch=0-step=0.ckpt", "epoch=1-step=1.ckpt"]


@pytest.mark.parametrize(("given", "kept"), [({}, 1), ({"save_top_k": -1}, 3), ({"save_top_k": 0}, 0)])
def test_a_callback_without_monitor_watches_val_loss_and_keeps_its_mode(
    pl: Any, given: dict[str, Any], kept: int, tmp_path: Path
) -> None:
    callback = CHECKPOINT[pl](dirpath=str(tmp_path), mode="max", **given)
    trainer = trainer_of(pl, max_epochs=3, checkpoint_callback=True, callbacks=[callback])
    with pytest.warns(FutureWarning, match="ModelCheckpoint without monitor watches 'val_loss'"):
        trainer.fit(model_of(pl, validation_step=scores("val_loss")), loader(1), loader(1))
    assert callback.monitor == "val_loss"
    assert len(list(tmp_path.glob("*.ckpt"))) == kept
    if kept:
        assert Path(callback.best_model_path).name == "epoch=0-step=0.ckpt"


def test_a_resumed_run_goes_on_with_the_same_ranking(pl: Any, tmp_path: Path) -> None:
    def run(epochs: int, **flags: Any) -> Any:
        callback = CHECKPOINT[pl](dirpath=str(tmp_path), save_last=True)
        trainer = trainer_of(pl, max_epochs=epochs, checkpoint_callback=True, callbacks=[callback], **flags)
        trainer.fit(model_of(pl, validation_step=scores("val_loss")), loader(1), loader(1))
        return callback

    run(2)
    resumed = run(3, resume_from_checkpoint=str(tmp_path / "last.ckpt"))
    assert resumed.monitor == "val_loss"
    [(path, score)] = resumed.best_k_models.items()
    assert (Path(path).name, float(score)) == ("epoch=1-step=1.ckpt", 1.0)


def test_weights_save_path_has_the_checkpoint_of_its_time(pl: Any, tmp_path: Path) -> None:
    trainer = trainer_of(pl, checkpoint_callback=True, weights_save_path=str(tmp_path / "own"))
    assert type(trainer.checkpoint_callback) is CHECKPOINT[pl]
    assert trainer.checkpoint_callback.dirpath == str(tmp_path / "own" / "checkpoints")
    assert trainer_of(pl, fast_dev_run=True, checkpoint_callback=True).checkpoint_callback is None


# ---- a second fit --------------------------------------------------------------------------------------------------


def noting(pl: Any) -> Any:
    model = model_of(
        pl,
        training_step=lambda self, batch, batch_idx: (
            self.seen.append((self.current_epoch, self.global_step)) or self.weight.sum()
        ),
    )
    model.seen = []
    return model


def test_a_second_fit_trains_the_last_epoch_once_more(pl: Any) -> None:
    trainer, model = trainer_of(pl), noting(pl)
    trainer.fit(model, loader(2))
    assert model.seen == [(0, 0), (0, 1), (1, 2), (1, 3)]
    for steps in (4, 6):
        model.seen.clear()
        trainer.fit(model, loader(2))
        assert model.seen == [(1, steps), (1, steps + 1)]
        assert (trainer.current_epoch, trainer.global_step) == (1, steps + 2)
    model.seen.clear()
    trainer.max_epochs = 3
    trainer.fit(model, loader(2))
    assert model.seen == [(1, 8), (1, 9), (2, 10), (2, 11)]


def test_a_second_fit_keeps_to_max_steps(pl: Any) -> None:
    trainer, model = trainer_of(pl, max_epochs=5, max_steps=3), noting(pl)
    trainer.fit(model, loader(2))
    for _ in range(2):
        model.seen.clear()
        trainer.fit(model, loader(2))
        assert model.seen == []
        assert (trainer.current_epoch, trainer.global_step) == (1, 3)


def test_a_second_fit_that_resumes_counts_as_its_checkpoint(pl: Any, tmp_path: Path) -> None:
    trainer, model = trainer_of(pl), noting(pl)
    trainer.fit(model, loader(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.max_epochs = 3
    model.seen.clear()
    trainer.fit(model, loader(2), ckpt_path=str(tmp_path / "a.ckpt"))
    assert model.seen == [(2, 4), (2, 5)]


# ---- dictionaries that steps and hooks return, in 1.1 ----------------------------------------------------------------


def returns(**values: Any) -> Any:
    return lambda self, *args: dict(values)


def numbered(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    return {"val_loss": torch.tensor(float(batch_idx)), "log": {"a": torch.tensor(2.0 * batch_idx)}}


@pytest.mark.parametrize(
    ("members", "seen", "logged"),
    [
        ({"validation_epoch_end": returns(val_loss=5.0, text="x")}, {"val_loss": 5.0}, {}),
        (
            {"validation_epoch_end": returns(val_loss=torch.tensor(5.0), log={"a": 1.0}, progress_bar={"p": 2.0})},
            {"val_loss": 5.0, "a": 1.0, "p": 2.0},
            {"a": 1.0},
        ),
        ({"validation_epoch_end": returns(val_loss=5.0, log={"val_loss": 4.0})}, {"val_loss": 4.0}, {"val_loss": 4.0}),
        ({"validation_step": numbered}, {"val_loss": 1.0, "a": 2.0}, {"a": 2.0}),
        (
            {"training_step": lambda self, batch, batch_idx: {"loss": self.weight.sum() * 0 + 3, "extra": batch_idx}},
            {"loss": 3.0, "extra": 1.0},
            {},
        ),
    ],
)
def test_callbacks_of_1_1_see_the_numbers_that_are_returned(
    members: dict[str, Any], seen: dict[str, float], logged: dict[str, float]
) -> None:
    trainer = trainer_of(v1_1)
    trainer.fit(model_of(v1_1, **{"validation_step": returns(), **members}), loader(2), loader(2))
    assert floats(trainer.callback_metrics) == seen
    assert floats(trainer.logged_metrics) == logged


def test_what_is_logged_by_name_wins_over_what_is_returned() -> None:
    def logs_and_returns(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 0:
            self.log("extra", 1.0, on_step=False, on_epoch=True)
        return {"loss": self.weight.sum(), "extra": 7.0}

    trainer = trainer_of(v1_1, max_epochs=2)
    trainer.fit(model_of(v1_1, training_step=logs_and_returns), loader(2))
    assert float(trainer.callback_metrics["extra"]) == 1.0


def test_a_test_of_1_1_returns_the_numbers_and_1_3_does_not(pl: Any) -> None:
    expected = [{"test_loss": 9.0}] if pl is v1_1 else [{}]
    model = model_of(pl, test_step=returns(), test_epoch_end=returns(test_loss=9.0))
    assert trainer_of(pl).test(model, test_dataloaders=loader(1), verbose=False) == expected


def test_a_returned_val_loss_chooses_the_checkpoint_of_1_1(tmp_path: Path) -> None:
    def ends(self: Any, outputs: Any) -> dict[str, Any]:
        return {"val_loss": torch.stack([each["val_loss"] for each in outputs]).mean()}

    def validates(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"val_loss": torch.tensor([5.0, 1.0, 3.0][self.current_epoch])}

    trainer, weight = after_a_test(v1_1, tmp_path, validation_step=validates, validation_epoch_end=ends)
    assert weight == -2.0
    assert trainer.checkpoint_callback.monitor == "val_loss"


def test_a_run_of_1_1_resumes_in_an_epoch_whose_steps_return_numbers(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0 and not (tmp_path / "a.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    def step(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.weight.sum(), "extra": 7.0}

    trainer_of(v1_1, max_epochs=1, callbacks=[Saves()]).fit(model_of(v1_1, training_step=step), loader(2))
    model = model_of(v1_1, training_step=step)
    trainer = trainer_of(v1_1, max_epochs=1, resume_from_checkpoint=str(tmp_path / "a.ckpt"))
    trainer.fit(model, loader(2))
    assert (model.weight.item(), float(trainer.callback_metrics["extra"])) == (-2.0, 7.0)
