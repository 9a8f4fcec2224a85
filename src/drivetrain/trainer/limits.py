"""The limits of a run as the Trainer shows them: to read, and to change while it runs (spec 3.10)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.loops.run import ENDLESS, Limits, Run
from drivetrain.settings import Settings, check, val_interval_of


class LimitsView:
    """The Trainer's writable properties about when and how much.

    A write is checked as the argument of the same name is, and counts from the next batch on; one of
    ``limit_*_batches`` from the next pass over the data. It holds for later runs of this Trainer too.
    """

    settings: Settings
    limits: Limits
    _run_parts: Run | None

    def _write(self, argument: str, value: Any, field: str, stored: Any) -> None:
        check(argument, value)
        setattr(self.limits, field, stored)
        self._touch()

    def _touch(self) -> None:
        """Tell a loop that runs to bind itself anew at the next batch."""
        if self._run_parts is not None:
            self._run_parts.stale = True

    @property
    def max_epochs(self) -> int | None:
        """Epochs at most; -1: no limit."""
        return -1 if self.limits.max_epochs == ENDLESS else int(self.limits.max_epochs)

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._write("max_epochs", value, "max_epochs", ENDLESS if value in (-1, None) else value)

    @property
    def min_epochs(self) -> int | None:
        """Epochs at least."""
        return self.limits.min_epochs

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self._write("min_epochs", value, "min_epochs", value or 0)

    @property
    def max_steps(self) -> int:
        """Optimizer steps at most; -1: no limit."""
        return -1 if self.limits.max_steps == ENDLESS else int(self.limits.max_steps)

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._write("max_steps", value, "max_steps", ENDLESS if value == -1 else value)

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps at least; ``None`` where nobody asked for any."""
        return self.limits.min_steps or self.settings.min_steps

    @min_steps.setter
    def min_steps(self, value: int | None) -> None:
        self._write("min_steps", value, "min_steps", value or 0)

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of one optimizer step; a change counts from the next window on."""
        return self.limits.accumulate

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        run = self._run_parts
        if value != 1 and run is not None and run.progress.stage is not None and not run.module.automatic_optimization:
            raise ConfigurationError(
                f"trainer.accumulate_grad_batches = {value!r} would do nothing under manual optimization. "
                "Call optimizer.step() in every n-th training_step only."
            )
        self._write("accumulate_grad_batches", value, "accumulate", value)

    @property
    def log_every_n_steps(self) -> int:
        """Logged values are flushed every so many optimizer steps."""
        return self.limits.log_every_n_steps

    @log_every_n_steps.setter
    def log_every_n_steps(self, value: int) -> None:
        self._write("log_every_n_steps", value, "log_every_n_steps", value)

    @property
    def val_check_interval(self) -> int | float | timedelta:
        """Training batches (int), the fraction of an epoch (float), or the time between validations."""
        seconds = self.limits.val_check_seconds
        return self.limits.val_check_interval if seconds is None else timedelta(seconds=seconds)

    @val_check_interval.setter
    def val_check_interval(self, value: int | float | str | timedelta | dict[str, int]) -> None:
        check("val_check_interval", value)
        self.limits.val_check_interval, self.limits.val_check_seconds = val_interval_of(value)
        self._touch()

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Validation runs in every n-th epoch; ``None``: batches are counted across epochs."""
        return self.limits.check_val_every_n_epoch

    @check_val_every_n_epoch.setter
    def check_val_every_n_epoch(self, value: int | None) -> None:
        self._write("check_val_every_n_epoch", value, "check_val_every_n_epoch", value)

    @property
    def limit_train_batches(self) -> int | float:
        """Batches of a training epoch: a count (int) or a fraction (float)."""
        return self.limits.train_batches

    @limit_train_batches.setter
    def limit_train_batches(self, value: int | float) -> None:
        self._write("limit_train_batches", value, "train_batches", value)

    @property
    def limit_val_batches(self) -> int | float:
        """Batches of each validation loader: a count (int) or a fraction (float)."""
        return self.limits.val_batches

    @limit_val_batches.setter
    def limit_val_batches(self, value: int | float) -> None:
        self._write("limit_val_batches", value, "val_batches", value)

    @property
    def limit_test_batches(self) -> int | float:
        """Batches of each test loader: a count (int) or a fraction (float)."""
        return self.limits.test_batches

    @limit_test_batches.setter
    def limit_test_batches(self, value: int | float) -> None:
        self._write("limit_test_batches", value, "test_batches", value)

    @property
    def limit_predict_batches(self) -> int | float:
        """Batches of each prediction loader: a count (int) or a fraction (float)."""
        return self.limits.predict_batches

    @limit_predict_batches.setter
    def limit_predict_batches(self, value: int | float) -> None:
        self._write("limit_predict_batches", value, "predict_batches", value)

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        """Loaders that a hook makes are made anew every so many epochs; 0: never."""
        return self.limits.reload_every

    @reload_dataloaders_every_n_epochs.setter
    def reload_dataloaders_every_n_epochs(self, value: int) -> None:
        self._write("reload_dataloaders_every_n_epochs", value, "reload_every", value)
