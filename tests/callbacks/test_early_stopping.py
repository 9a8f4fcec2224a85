"""EarlyStopping in real fits: when it stops, why, and when it must not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.base.restoring import WrongForm
from drivetrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
from drivetrain.callbacks.early_stopping import EarlyStoppingReason as Reason
from drivetrain.errors import ConfigurationError, NotLoggedError

NAN, INF = float("nan"), float("inf")
STEPS = 4  # optimizer steps per epoch


class Scripted(LightningModule):
    """Logs values given beforehand: ``scores`` one per validation, ``epochs`` one per training epoch."""

    def __init__(self, scores: Any = (), epochs: Any = ()) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.scores, self.epochs, self.validations = list(scores), list(epochs), 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        if self.epochs:
            self.log("epoch_score", self.epochs[self.current_epoch])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            self.log("score", NAN)
        elif self.scores:
            self.log("score", self.scores[self.validations])

    def on_validation_epoch_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(tmp_path: Path, callback: Any, module: LightningModule, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    loader = DataLoader(TensorDataset(torch.ones(STEPS * 2, 1)), batch_size=2)
    given: dict[str, Any] = {
        "max_epochs": 10, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": tmp_path, "accelerator": "cpu", "callbacks": callback,
    }  # fmt: skip
    trainer = Trainer(**{**given, **arguments})
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    return trainer


FALLING = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("arguments", "scores", "epochs", "reason"),
    [
        pytest.param({}, FALLING, 10, Reason.NOT_STOPPED, id="it improves"),
        pytest.param({}, [1.0] * 10, 4, Reason.PATIENCE_EXHAUSTED, id="patience is 3 by default"),
        pytest.param({"patience": 1}, [1.0] * 10, 2, Reason.PATIENCE_EXHAUSTED, id="patience 1"),
        pytest.param({"patience": 0}, [1.0] * 10, 2, Reason.PATIENCE_EXHAUSTED, id="patience 0"),
        pytest.param({"patience": 2}, [1.0, 1.0, 0.5, 0.6, 0.7] + [0] * 5, 5, Reason.PATIENCE_EXHAUSTED, id="anew"),
        pytest.param({"mode": "max", "patience": 2}, FALLING, 3, Reason.PATIENCE_EXHAUSTED, id="mode max"),
        pytest.param({"mode": "max"}, FALLING[::-1], 10, Reason.NOT_STOPPED, id="mode max, it improves"),
        pytest.param({"min_delta": 0.15, "patience": 2}, FALLING, 10, Reason.NOT_STOPPED, id="slow but enough in two"),
        pytest.param({"min_delta": 0.5, "patience": 2}, FALLING, 3, Reason.PATIENCE_EXHAUSTED, id="too slow"),
        pytest.param(
            {"min_delta": -0.5, "patience": 2}, FALLING, 3, Reason.PATIENCE_EXHAUSTED, id="the sign is ours",
            marks=pytest.mark.filterwarnings("ignore:EarlyStopping.min_delta=-0.5"),
        ),
        pytest.param(
            {"min_delta": 0.5, "patience": 2, "mode": "max"}, FALLING[::-1], 3, Reason.PATIENCE_EXHAUSTED,
            id="too slow, mode max",
        ),
        pytest.param({}, [1.0, NAN] + [0.0] * 8, 2, Reason.NON_FINITE_METRIC, id="NaN"),
        pytest.param({}, [1.0, -INF] + [0.0] * 8, 2, Reason.NON_FINITE_METRIC, id="infinite"),
        pytest.param(
            {"check_finite": False}, [1.0, NAN, NAN, NAN] + [0.0] * 6, 4, Reason.PATIENCE_EXHAUSTED, id="NaN is endured"
        ),
        pytest.param({"stopping_threshold": 0.65}, FALLING, 5, Reason.STOPPING_THRESHOLD, id="good enough"),
        pytest.param({"stopping_threshold": 0.5}, FALLING, 7, Reason.STOPPING_THRESHOLD, id="equal is not better"),
        pytest.param(
            {"stopping_threshold": 0.35, "mode": "max"}, FALLING[::-1], 4, Reason.STOPPING_THRESHOLD, id="good, max"
        ),
        pytest.param(
            {"divergence_threshold": 2.0}, [1.0, 2.0, 2.5] + [0.0] * 7, 3, Reason.DIVERGENCE_THRESHOLD, id="diverged"
        ),
        pytest.param(
            {"divergence_threshold": 0.5, "mode": "max"}, [1.0, 0.4] + [2.0] * 8, 2, Reason.DIVERGENCE_THRESHOLD,
            id="diverged, max",
        ),
    ],
)  # fmt: skip
def test_t29_when_and_why(
    tmp_path: Path, arguments: dict[str, Any], scores: list[float], epochs: int, reason: Reason
) -> None:
    callback = EarlyStopping("score", **arguments)
    trainer = fit(tmp_path, callback, Scripted(scores))
    assert trainer.current_epoch == epochs
    assert trainer.global_step == epochs * STEPS
    assert callback.stopping_reason is reason
    stopped = reason is not Reason.NOT_STOPPED
    assert trainer.should_stop is stopped
    assert callback.stopped_epoch == (epochs - 1 if stopped else 0)
    assert (callback.stopping_reason_message is not None) is stopped
    if stopped:
        assert "score" in str(callback.stopping_reason_message)
        assert str(callback.stopping_reason_message).endswith("stopping.")


def test_what_it_remembers(tmp_path: Path) -> None:
    callback = EarlyStopping("score", patience=2)
    fit(tmp_path, callback, Scripted([1.0, 0.5, 0.75, 0.625]))
    assert callback.best_score == 0.5
    assert callback.wait_count == 2
    other = EarlyStopping("score", patience=7)
    other.load_state_dict(callback.state_dict())
    assert (other.best_score, other.wait_count, other.stopped_epoch, other.patience) == (0.5, 2, 3, 7)


def restarted(tmp_path: Path, *, callback: EarlyStopping | None = None, **arguments: Any) -> tuple[int, EarlyStopping]:
    """Resume from the last checkpoint of a run whose score never improves; the epochs that are done after it."""
    callback = EarlyStopping("score", patience=2) if callback is None else callback
    saver = ModelCheckpoint(tmp_path / "saved", save_last=True, every_n_epochs=1)
    trainer = fit(
        tmp_path, [callback, saver], Scripted([1.0] * 40), enable_checkpointing=True, ckpt_path="last",
        **{"max_epochs": 20, **arguments},
    )  # fmt: skip
    return trainer.current_epoch, callback


def test_a_run_that_was_stopped_is_not_trained_further_when_it_is_resumed(tmp_path: Path, caplog: Any) -> None:
    assert restarted(tmp_path)[0] == 3
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            epochs, callback = restarted(tmp_path)
        assert epochs == 3
        assert callback.stopping_reason is Reason.PATIENCE_EXHAUSTED
        assert (
            "EarlyStopping('score') had stopped this run in epoch 2: score has not improved on 1 for 2 checks"
            in caplog.text
        )
        assert "The run stops again. To continue training, change its patience" in caplog.text


@pytest.mark.parametrize(
    ("callback", "arguments", "epochs", "change"),
    [
        ({"patience": 4}, {}, 5, "patience is 4 instead of 2"),
        ({"patience": 2, "stopping_threshold": 0.5}, {}, 4, "stopping_threshold is 0.5 instead of None"),
        ({"patience": 2}, {"max_epochs": 30}, 4, "max_epochs is 30 instead of 20"),
        ({"patience": 2}, {"max_epochs": -1}, 4, "max_epochs is -1 instead of 20"),
    ],
)
def test_what_stopped_it_was_changed_so_it_continues(
    tmp_path: Path, caplog: Any, callback: dict[str, Any], arguments: dict[str, Any], epochs: int, change: str
) -> None:
    assert restarted(tmp_path)[0] == 3
    with caplog.at_level(logging.INFO):
        found, _ = restarted(tmp_path, callback=EarlyStopping("score", **callback), **arguments)
    assert found == epochs
    assert "EarlyStopping('score') had stopped this run: score has not improved on 1 for 2 checks" in caplog.text
    assert f"Now {change}, so the run continues." in caplog.text


def test_fewer_epochs_are_no_reason_to_continue(tmp_path: Path) -> None:
    assert restarted(tmp_path)[0] == 3
    assert restarted(tmp_path, max_epochs=10)[0] == 3


def test_a_request_of_the_user_is_not_saved(tmp_path: Path) -> None:
    class Asking(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    saver = ModelCheckpoint(tmp_path / "saved", save_last=True)
    first = fit(tmp_path, [Asking(), saver], Scripted([1.0] * 9), enable_checkpointing=True)
    assert first.current_epoch == 2
    saver = ModelCheckpoint(tmp_path / "saved", save_last=True)
    second = fit(tmp_path, [saver], Scripted([1.0] * 9), enable_checkpointing=True, ckpt_path="last", max_epochs=5)
    assert second.current_epoch == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stopping_reason": 3}, r"\['stopping_reason'\] is 3, and str is expected"),
        ({"stopping_reason": "tired"}, "is 'tired', which is no EarlyStoppingReason"),
        ({"stopping_reason_message": 3}, r"\['stopping_reason_message'\] is 3"),
        ({"stopped_with": None}, r"\['stopped_with'\] is None"),
    ],
)
def test_a_damaged_reason_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    callback = EarlyStopping("score", patience=1)
    fit(tmp_path, callback, Scripted([1.0] * 5))
    with pytest.raises(WrongForm, match=message):
        EarlyStopping("score").load_state_dict({**callback.state_dict(), **changes})


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    first = fit(tmp_path, EarlyStopping("score", patience=3), Scripted([0.5, 0.75, 0.625]), max_epochs=3)
    first.save_checkpoint(tmp_path / "a.ckpt")
    callback, module = EarlyStopping("score", patience=3), Scripted([0.625] * 9)
    loader = DataLoader(TensorDataset(torch.ones(STEPS * 2, 1)), batch_size=2)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=9,
        enable_checkpointing=False, default_root_dir=tmp_path, callbacks=callback,
    )  # fmt: skip
    trainer.fit(module, loader, loader, ckpt_path=tmp_path / "a.ckpt")
    assert trainer.current_epoch == 4
    assert (callback.best_score, callback.wait_count) == (0.5, 3)


@pytest.mark.filterwarnings("ignore:This EarlyStopping has been used")
def test_the_reason_is_that_of_the_last_fit(tmp_path: Path) -> None:
    callback = EarlyStopping("score", patience=1)
    fit(tmp_path, callback, Scripted([1.0, 2.0]))
    assert callback.stopping_reason is Reason.PATIENCE_EXHAUSTED
    fit(tmp_path, callback, Scripted(FALLING[1:]), max_epochs=9)
    assert callback.stopping_reason is Reason.NOT_STOPPED
    assert (callback.stopping_reason_message, callback.stopped_epoch) == (None, 0)


def test_the_best_score_is_a_tensor_on_the_host(tmp_path: Path) -> None:
    callback = EarlyStopping("score")
    assert callback.best_score.item() == INF
    assert EarlyStopping("score", mode="max").best_score.item() == -INF
    fit(tmp_path, callback, Scripted([0.1]), max_epochs=1)
    assert callback.best_score.item() == pytest.approx(0.1, abs=1e-8)
    assert callback.best_score.device.type == "cpu"


def test_a_plain_number_in_callback_metrics_is_a_metric(tmp_path: Path) -> None:
    class Writes(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.callback_metrics["own"] = float(trainer.current_epoch)

    callback = EarlyStopping("own", patience=2)
    trainer = fit(tmp_path, [callback, Writes()], Scripted(FALLING), check_val_every_n_epoch=1)
    assert trainer.current_epoch == 3


def test_the_reason_is_logged_and_improvements_only_if_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain")
    for verbose, improvements in ((False, 0), (True, 2)):
        caplog.clear()
        fit(tmp_path, EarlyStopping("score", patience=1, verbose=verbose), Scripted([1.0, 0.5, 0.75]))
        messages = [record.message for record in caplog.records]
        assert sum("improved from" in message for message in messages) == improvements
        assert "score has not improved on 0.5 for 1 check (last value 0.75, mode='min'): stopping." in messages


# ---- when it must not stop yet (trap T29) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "epochs", "steps"),
    [
        ({}, 2, 8),
        ({"min_epochs": 2}, 2, 8),
        ({"min_epochs": 5}, 5, 20),
        ({"min_steps": 8}, 2, 8),
        ({"min_steps": 12}, 3, 12),
        ({"min_steps": 10}, 3, 10),
        ({"min_epochs": 3, "min_steps": 16}, 4, 16),
        ({"min_epochs": 20}, 10, 40),
    ],
)
def test_t29_min_epochs_and_min_steps_are_respected(
    tmp_path: Path, arguments: dict[str, Any], epochs: int, steps: int
) -> None:
    callback = EarlyStopping("score", patience=1)
    trainer = fit(tmp_path, callback, Scripted([1.0] * 11), **arguments)
    assert (trainer.current_epoch, trainer.global_step) == (epochs, steps)
    assert trainer.should_stop  # the request is remembered


def test_t29_a_request_that_is_put_off_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain")
    fit(tmp_path, EarlyStopping("score", patience=1), Scripted([1.0] * 10), min_epochs=5)
    messages = [record.message for record in caplog.records if "training continues" in record.message]
    assert len(messages) == 1
    assert "until min_epochs=5" in messages[0]


def test_t29_a_request_that_is_honoured_at_once_is_not_said_to_be_put_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="drivetrain")
    trainer = fit(tmp_path, EarlyStopping("score", patience=1), Scripted([1.0] * 10), min_epochs=2)
    assert trainer.current_epoch == 2
    assert [record.message for record in caplog.records if "training continues" in record.message] == []


def test_t29_a_request_that_is_put_off_is_remembered_when_the_metric_recovers(tmp_path: Path) -> None:
    callback = EarlyStopping("score", patience=1)
    trainer = fit(tmp_path, callback, Scripted([1.0, 2.0, 0.5, 0.4, 0.3, 0.2]), min_epochs=4)
    assert trainer.current_epoch == 4
    assert callback.stopped_epoch == 1
    assert callback.stopping_reason is Reason.PATIENCE_EXHAUSTED


def test_t29_not_in_fast_dev_run(tmp_path: Path) -> None:
    callback = EarlyStopping("score", patience=0)
    trainer = fit(tmp_path, callback, Scripted([NAN] * 10), fast_dev_run=2)
    assert not trainer.should_stop
    assert trainer.global_step == 2
    assert callback.stopping_reason is Reason.NOT_STOPPED


def test_a_trial_refuses_a_name_that_nothing_logged(tmp_path: Path) -> None:
    with pytest.raises(NotLoggedError, match="EarlyStopping watches 'scor', which was not logged.*score"):
        fit(tmp_path, EarlyStopping("scor"), Scripted([1.0] * 10), fast_dev_run=True)


@pytest.mark.parametrize("watcher", ["EarlyStopping", "monitor", "filename", "ReduceLROnPlateau"])
def test_the_sanity_check_warns_of_a_misspelt_name(tmp_path: Path, watcher: str) -> None:
    """Before the first epoch, naming the one that was meant, and of no other name."""

    class Watching(Scripted):
        wrong = "scores"

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            if watcher != "ReduceLROnPlateau":
                return optimizer
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.wrong}}

        def on_train_start(self) -> None:
            raise KeyError("no epoch has begun")

    makers: dict[str, Callable[[str], Any]] = {
        "EarlyStopping": EarlyStopping,
        "monitor": lambda name: ModelCheckpoint(tmp_path, monitor=name),
        "filename": lambda name: ModelCheckpoint(tmp_path, filename=f"{{epoch}}-{{{name}:.2f}}"),
        "ReduceLROnPlateau": lambda name: None,
    }
    said = f"{watcher}.* names 'scores', which the sanity check did not log; it logged 'score'"
    for name, warned in (("scores", pytest.warns(UserWarning, match=said)), ("train_score", nullcontext())):
        module = Watching([1.0] * 10)
        module.wrong = name
        with pytest.raises(KeyError, match="no epoch has begun"), warned:
            fit(tmp_path, makers[watcher](name), module, num_sanity_val_steps=1, enable_checkpointing=None)


def test_t29_not_in_the_sanity_check(tmp_path: Path) -> None:
    callback = EarlyStopping("score", patience=3)  # the sanity check logs NaN, which would stop at once
    trainer = fit(tmp_path, callback, Scripted(FALLING), num_sanity_val_steps=2)
    assert trainer.current_epoch == 10
    assert callback.stopping_reason is Reason.NOT_STOPPED


def test_t29_not_in_validate(tmp_path: Path) -> None:
    callback = EarlyStopping("score")
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=tmp_path, callbacks=callback,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    with pytest.warns(UserWarning, match="score: logged as nan"):
        assert trainer.validate(Scripted([NAN]), loader, verbose=False)[0].keys() == {"score"}
    assert not trainer.should_stop
    assert callback.wait_count == 0


# ---- when it looks ---------------------------------------------------------------------------------------------------


class Checks(Callback):
    """Counts by step how often the callback before it has looked."""

    def __init__(self, watched: EarlyStopping) -> None:
        self.watched = watched
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.watched.wait_count > len(self.steps):
            self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("arguments", "checked_before"),
    [
        ({}, [8, 12]),  # its first look, after step 4, sets the best score and is no waiting
        ({"val_check_interval": 0.5}, [4, 6, 8, 10, 12, 14]),
        ({"check_val_every_n_epoch": 1, "limit_train_batches": 2}, [4, 6]),
    ],
    ids=["once per epoch", "twice per epoch", "shorter epochs"],
)
def test_it_looks_after_each_validation(tmp_path: Path, arguments: dict[str, Any], checked_before: list[int]) -> None:
    callback = EarlyStopping("score", patience=99)
    checks = Checks(callback)
    fit(tmp_path, [callback, checks], Scripted([1.0] * 20), max_epochs=4, **arguments)
    assert checks.steps == checked_before


@pytest.mark.parametrize(("given", "limit_val_batches"), [(True, 1.0), (True, 0), (None, 0)])
def test_at_the_end_of_the_training_epoch_it_sees_what_was_logged_there(
    tmp_path: Path, given: bool | None, limit_val_batches: float
) -> None:
    callback = EarlyStopping("epoch_score", patience=1, check_on_train_epoch_end=given)
    module = Scripted(epochs=[1.0, 0.5, 0.75, 0.0, 0.0])
    trainer = fit(tmp_path, callback, module, limit_val_batches=limit_val_batches)
    assert trainer.current_epoch == 3
    assert (callback.best_score, callback.stopped_epoch) == (0.5, 2)


def test_t29_a_stop_in_the_middle_of_an_epoch_is_honoured_there(tmp_path: Path) -> None:
    callback = EarlyStopping("score", patience=1)
    trainer = fit(tmp_path, callback, Scripted([1.0] * 10), val_check_interval=1)
    assert trainer.global_step == 2


# ---- a monitor that is not there -------------------------------------------------------------------------------------


def test_strict_names_what_was_logged(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="watches 'scores', which was not logged. Logged so far: score. Log it"
    ):
        fit(tmp_path, EarlyStopping("scores"), Scripted(FALLING), num_sanity_val_steps=0)


def test_a_fit_that_does_not_validate_says_so_where_the_monitor_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="This fit does not validate: limit_val_batches is 0"):
        fit(tmp_path, EarlyStopping("score"), Scripted(FALLING), limit_val_batches=0)


@pytest.mark.parametrize(
    ("options", "scores", "words"),
    [
        ({}, [1.0, 2.0], "on 1 for 1 check (last value 2, mode='min'): stopping."),
        ({"mode": "max"}, [1.0, 0.5], "on 1 for 1 check (last value 0.5, mode='max'): stopping."),
        ({"min_delta": 0.5}, [1.0, 0.75], "(last value 0.75, mode='min', min_delta=0.5): stopping."),
    ],
)
def test_the_reason_to_stop_holds_the_last_value_and_what_it_was_judged_by(
    tmp_path: Path, options: dict[str, Any], scores: list[float], words: str
) -> None:
    callback = EarlyStopping("score", patience=1, **options)
    fit(tmp_path, callback, Scripted(scores))
    assert words in str(callback.stopping_reason_message)


def test_not_strict_warns_and_goes_on(tmp_path: Path) -> None:
    callback = EarlyStopping("scores", strict=False, patience=1)
    with pytest.warns(UserWarning, match="EarlyStopping watches 'scores', which was not logged"):
        trainer = fit(tmp_path, callback, Scripted(FALLING), max_epochs=3, num_sanity_val_steps=0)
    assert trainer.current_epoch == 3
    assert callback.wait_count == 0


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
@pytest.mark.parametrize("monitor", ["val_acc", "val/f1", "Test_AUROC", "iou"])
def test_a_metric_whose_higher_value_is_better_needs_a_mode(kind: Any, monitor: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"{kind.__name__}\(monitor='{monitor}'\) treats the lowest .* Write mode=\"max\""
    ):
        assert kind(monitor=monitor).mode == "min"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("min", "max"):
            assert kind(monitor=monitor, mode=mode).mode == mode


@pytest.mark.parametrize("monitor", ["val_loss", "accumulated", "precision_loss", "recall_error"])
def test_a_metric_whose_lower_value_is_better_needs_no_mode(monitor: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EarlyStopping(monitor=monitor).mode == "min"


def test_mode_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="mode='auto'.* Write one of these"):
        EarlyStopping("score", mode="auto")


def test_a_patience_of_another_type_is_answered_with_its_number() -> None:
    with pytest.raises(ConfigurationError, match=r"Write patience=5\.$"):
        EarlyStopping("score", patience=5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("patience", [-1, 2.5, "3"])
def test_patience_is_checked(patience: Any) -> None:
    with pytest.raises(ConfigurationError, match="patience is an int of at least 0. Write patience=3"):
        EarlyStopping("score", patience=patience)


def test_t48_two_of_them_watch_different_things(tmp_path: Path) -> None:
    patient, hasty = EarlyStopping("score", patience=5), EarlyStopping("score", mode="max", patience=2)
    assert patient.state_key != hasty.state_key
    trainer = fit(tmp_path, [patient, hasty], Scripted(FALLING))
    assert trainer.current_epoch == 3
    assert hasty.stopping_reason is Reason.PATIENCE_EXHAUSTED
    assert patient.stopping_reason is Reason.NOT_STOPPED
    assert trainer.early_stopping_callbacks == [patient, hasty]
    assert trainer.early_stopping_callback is patient


def test_a_training_metric_may_be_watched_although_there_is_validation(
    validated: Any, loader: Any, make_trainer: Any
) -> None:
    """Validation runs at the epoch's end, so everything is judged when the epoch has ended, as checkpoints are."""

    class Logs(validated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", float(batch_idx), on_step=True, on_epoch=True)
            return self.loss(batch)

    stopping = EarlyStopping("train", patience=1)
    trainer = make_trainer(max_epochs=5, callbacks=[stopping])
    trainer.fit(Logs(), loader, loader)
    assert stopping.best_score == 1.5  # the mean of 0 to 3, not the last step's value
    assert trainer.current_epoch == 2


def test_a_run_that_ends_before_its_first_validation_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="watches 'score', .* Training ended before the first validation"):
        trainer = fit(tmp_path, EarlyStopping("score"), Scripted([1.0]), max_steps=STEPS - 1)
    assert trainer.global_step == STEPS - 1
    with pytest.raises(ConfigurationError, match="watches 'scor', which was not logged"):
        fit(tmp_path, EarlyStopping("scor"), Scripted([1.0, 1.0]), max_steps=STEPS + 1, num_sanity_val_steps=0)


def test_a_negative_min_delta_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"min_delta=-0\.01\): the sign has no meaning.* Write min_delta=0\.01\."):
        EarlyStopping("val_loss", min_delta=-0.01)


@pytest.mark.parametrize(("on_epoch", "warns"), [(False, True), (True, False)])
def test_a_value_of_one_step_is_warned_of(
    make_trainer: Any, regression: Any, loader: Any, on_epoch: bool, warns: bool
) -> None:
    class Logs(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=not on_epoch, on_epoch=on_epoch)
            return loss

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2, callbacks=EarlyStopping("train_loss", mode="min")).fit(Logs(), loader)
    assert len([each for each in record if "judges by the last batch alone" in str(each.message)]) == warns


def test_the_comparison_of_its_mode_is_public() -> None:
    assert EarlyStopping("x").monitor_op is torch.lt
    assert EarlyStopping("x", mode="max").monitor_op is torch.gt
    assert EarlyStopping.order_dict["max"] == ">"
