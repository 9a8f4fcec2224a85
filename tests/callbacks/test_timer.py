from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain import Callback, Trainer
from drivetrain.base.restoring import WrongForm
from drivetrain.callbacks import Timer
from drivetrain.errors import ConfigurationError
from drivetrain.loops.progress import RunningStage


class Clock(Callback):
    """A training batch takes ten seconds, an evaluation batch one; nobody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 10

    def on_validation_batch_start(self, *_: Any) -> None:
        self.now += 1

    def on_test_batch_start(self, *_: Any) -> None:
        self.now += 1


def timed(**arguments: Any) -> tuple[Timer, Clock]:
    timer, clock = Timer(**arguments), Clock()
    timer._clock = clock
    return timer, clock


@pytest.mark.parametrize(
    ("duration", "interval", "batches"),
    [
        ("00:00:00:25", "step", 3),
        (timedelta(seconds=30), "step", 3),
        ({"seconds": 31}, "step", 4),
        ("00:00:00:25", "epoch", 4),
        ("00:00:00:45", "epoch", 8),
    ],
)
def test_training_ends_when_its_time_is_over(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, duration: Any, interval: str, batches: int
) -> None:
    timer, clock = timed(duration=duration, interval=interval)
    trainer = make_trainer(max_epochs=None, callbacks=[timer, clock])
    assert trainer.max_epochs == -1
    trainer.fit(regression(), loader)

    assert trainer.progress.total_batches == batches
    assert timer.time_elapsed() == 10 * batches


def test_max_time_is_a_timer(regression: Any, loader: DataLoader[Any], make_trainer: Any, caplog: Any) -> None:
    clock = Clock()
    trainer = make_trainer(max_epochs=None, max_time="00:00:00:35", callbacks=clock)
    [timer] = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    timer._clock = clock
    with caplog.at_level(logging.INFO, logger="drivetrain"):
        trainer.fit(regression(), loader)

    assert trainer.global_step == 4
    assert "The time for training is over: 0:00:40 of 0:00:35" in caplog.text


def test_time_is_counted_by_stage_with_validation_inside_of_training(
    validated: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    timer, clock = timed()
    trainer = make_trainer(max_epochs=2, callbacks=[timer, clock])
    trainer.fit(validated(), loader, loader)
    trainer.test(trainer.lightning_module, loader, verbose=False)

    assert timer.time_elapsed("train") == 2 * 4 * 10 + 2 * 4
    assert timer.time_elapsed("validate") == 2 + 2 * 4  # the sanity check too
    assert timer.time_elapsed(RunningStage.TESTING) == 4
    assert timer.time_elapsed("predict") == 0
    assert timer.time_remaining() is None
    assert timer.end_time("train") - timer.start_time("train") == 88  # type: ignore[operator]
    assert timer.start_time("predict") is timer.end_time("predict") is None


def test_what_is_gone_survives_a_resume(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    first = make_trainer(max_epochs=1, callbacks=list(timed(duration="00:00:01:00")))
    first.fit(regression(), loader)
    first.save_checkpoint(tmp_path / "a.ckpt")

    timer, clock = timed(duration="00:00:01:00")
    second = make_trainer(max_epochs=9, callbacks=[timer, clock])
    second.fit(regression(), loader, ckpt_path=tmp_path / "a.ckpt")
    assert second.global_step == 4 + 2
    assert timer.time_elapsed() == 60

    timer, clock = timed(duration="00:00:00:40")
    third = make_trainer(max_epochs=9, callbacks=[timer, clock])
    third.fit(regression(), loader, ckpt_path=tmp_path / "a.ckpt")
    assert third.progress.total_batches == 4  # nothing was left
    assert third.should_stop


def test_every_fit_has_its_whole_duration(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    timer, clock = timed(duration="00:00:00:20")
    trainer = make_trainer(max_epochs=9, callbacks=[timer, clock])
    trainer.fit(regression(), loader)
    trainer.fit(regression(), loader)

    assert trainer.global_step == 4


def test_a_timer_that_does_not_look_after_steps_costs_a_step_nothing() -> None:
    assert "on_train_batch_end" in Timer().idle_hooks
    assert "on_train_batch_end" in Timer("00:00:01:00", interval="epoch").idle_hooks
    assert "on_train_batch_end" not in Timer("00:00:01:00").idle_hooks
    assert Timer("00:00:01:00").ends_training
    assert not Timer().ends_training


def test_a_hook_of_a_subclass_is_not_idle() -> None:
    class Own(Timer):
        def on_train_batch_end(self, *_: Any) -> None:
            pass

    assert "on_train_batch_end" not in Own().idle_hooks


def test_t29_min_epochs_come_before_the_time(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    timer, clock = timed(duration="00:00:00:25")
    trainer = make_trainer(max_epochs=9, min_epochs=2, callbacks=[timer, clock])
    trainer.fit(regression(), loader)
    assert trainer.current_epoch == 2


def test_a_quiet_timer_says_nothing(
    regression: Any, loader: DataLoader[Any], make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    timer, clock = timed(duration="00:00:00:25", verbose=False)
    with caplog.at_level(logging.INFO, logger="drivetrain"):
        trainer = make_trainer(callbacks=[timer, clock])
        trainer.fit(regression(), loader)
    assert trainer.global_step == 3
    assert "time" not in caplog.text


def test_an_exception_stops_the_clocks(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    class Broken(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("broken")

    timer, clock = timed()
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(callbacks=[timer, clock], num_sanity_val_steps=0).fit(Broken(), loader, loader)
    clock.now += 500
    assert (timer.time_elapsed("train"), timer.time_elapsed("validate")) == (41, 1)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"Timer\(duration='1h'\): duration is a duration"):
        Timer("1h")
    with pytest.raises(ConfigurationError, match="Write one of these"):
        Timer(interval="batch")
    with pytest.raises(ConfigurationError, match="knows no stage 'fit'"):
        Timer().time_elapsed("fit")
    with pytest.raises(ConfigurationError, match="both limit the time. Keep one"):
        Trainer(max_time="00:00:01:00", callbacks=Timer())


@pytest.mark.parametrize(
    ("elapsed", "message"),
    [
        (3, r"\['time_elapsed'\] is 3"),
        ({}, r"\['time_elapsed'\]\['train'\] is missing"),
        ({"train": "x"}, r"\['train'\] is 'x'"),
        ({"train": float("nan")}, r"\['train'\] is nan, and a number of seconds is expected"),
        ({"train": -1.0}, r"\['train'\] is -1.0, and a number of seconds is expected"),
    ],
)
def test_a_state_of_another_form_is_refused(elapsed: Any, message: str) -> None:
    timer = Timer("00:00:00:09")
    with pytest.raises(WrongForm, match=message):
        timer.load_state_dict({"time_elapsed": elapsed})
    assert timer.time_elapsed() == 0
