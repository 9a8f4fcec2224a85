"""Measure how long each stage takes, and stop training at a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import Any

from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.restoring import WrongForm, entry, number
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, check_choice
from drivetrain.loops.stop import TIME_LIMIT
from drivetrain.settings import seconds_of

_STAGES = ("train", "validate", "test", "predict")


class Timer(Callback):
    """Measures the time of training, validation, testing and prediction, and limits the time of training.

    Args:
        duration: the maximum training time, including validation: "DD:HH:MM:SS", a timedelta or a dictionary of its
            arguments; ``None`` sets no limit.
        interval: "step" checks the time after each batch, "epoch" at the end of each epoch.
        verbose: log a line when the time is over.

    A checkpoint contains the time used so far, and a resumed run has only the remaining time.

    Raises:
        ConfigurationError: ``duration`` or ``interval`` is invalid.
    """

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        super().__init__()
        check_choice("Timer", "interval", interval, ("step", "epoch"))
        self.duration_s = None if duration is None else seconds_of("duration", duration, owner="Timer")
        self.interval = interval
        self.verbose = verbose
        self.ends_training = self.duration_s is not None
        self._clock = time.monotonic
        self._asked = False  # whether the callback has asked the fit to stop
        self._starts: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        self._earlier_s = dict.fromkeys(_STAGES, 0.0)  # the seconds in the resumed checkpoint, by stage
        wanted = {"on_train_batch_end": interval == "step", "on_train_epoch_end": interval == "epoch"}
        self.idle_hooks = frozenset(
            hook
            for hook, needed in wanted.items()
            if not (needed and self.ends_training) and not overrides(self, hook, Timer)
        )

    def start_time(self, stage: str = "train") -> float | None:
        """Return when ``stage`` began, in seconds of a monotonic clock; ``None`` if it has not begun."""
        return self._starts.get(_name(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when ``stage`` ended, in seconds of a monotonic clock; ``None`` if it has not ended."""
        return self._ends.get(_name(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the number of seconds of a stage so far, including the seconds in the resumed checkpoint.

        Args:
            stage: "train", "validate", "test" or "predict".
        """
        name = _name(stage)
        begin = self._starts.get(name)
        if begin is None:
            return self._earlier_s[name]
        return self._earlier_s[name] + self._ends.get(name, self._clock()) - begin

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return how many seconds of ``duration`` remain; ``None`` without a duration."""
        return None if self.duration_s is None else self.duration_s - self.time_elapsed(stage)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # load_state_dict() is called later, and sets the time from a checkpoint
            self._asked = False
            self._starts.clear()
            self._ends.clear()
            self._earlier_s = dict.fromkeys(_STAGES, 0.0)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)  # a resumed fit may have no time left

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stage = _name(trainer.progress.loop_stage)
        if stage in self._ends:  # if a stage runs again, the times are added
            self._earlier_s[stage] = self.time_elapsed(stage)
            del self._ends[stage]
        self._starts[stage] = self._clock()

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ends[_name(trainer.progress.loop_stage)] = self._clock()

    on_validation_end = on_test_end = on_predict_end = on_train_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for stage in self._starts.keys() - self._ends.keys():
            self._ends[stage] = self._clock()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._check(trainer, in_epoch=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)

    def _check(self, trainer: Trainer, in_epoch: bool = False) -> None:
        left = self.time_remaining()
        if left is not None and left <= 0 and not trainer.should_stop and not self._asked:
            self._asked = True
            stopper = trainer.current_run.stopping.stopper if in_epoch and trainer.current_run is not None else None
            if stopper is not None:
                stopper.ask(TIME_LIMIT)  # the ranks' clocks differ, and all ranks must stop after the same batch
            if stopper is None or trainer.world_size == 1:
                trainer.should_stop = True
            if self.verbose:
                rank_zero_info(
                    f"The time for training is over: {timedelta(seconds=int(self.time_elapsed()))} of "
                    f"{timedelta(seconds=self.duration_s or 0)}. Stopping."
                )

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        elapsed = entry(state_dict, "time_elapsed", dict.fromkeys(_STAGES, (int, float, _seconds)))
        self._earlier_s.update({stage: float(elapsed[stage]) for stage in _STAGES})
        self._starts.clear()
        self._ends.clear()


def _seconds(value: Any, place: str) -> None:
    if not 0 <= number(value, place) < math.inf:
        raise WrongForm(place, f"is {value}, and a number of seconds is expected")


def _name(stage: Any) -> str:
    name = stage.value if isinstance(stage, Enum) else stage
    name = "validate" if name == "sanity_check" else name
    if name not in _STAGES:
        raise ConfigurationError(f"A Timer knows no stage {stage!r}. Write one of {', '.join(map(repr, _STAGES))}.")
    return str(name)
