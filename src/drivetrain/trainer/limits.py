"""The Trainer's arguments as properties. User code can change the limits during a run. All other arguments are
read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError, shown
from drivetrain.loops.progress import Progress
from drivetrain.loops.run import ARGUMENTS, ENDLESS, Limits, Run
from drivetrain.settings import Settings, check, val_interval_of


def _limit(name: str, doc: str, read_as: Callable[[Any], Any] | None = None) -> Any:
    """Return the property ``name`` of a :class:`LimitsView`, which reads and writes a field of ``Limits``.

    Args:
        name: the name of the property and of the Trainer's argument. A written value must be valid for this argument.
        doc: the property's docstring.
        read_as: a function that converts the field's value to the property's value; ``None``: the values are equal.
    """
    field, kept = ARGUMENTS[name]

    def read(view: LimitsView) -> Any:
        limit = getattr(view.limits, field)
        return limit if read_as is None else read_as(limit)

    def write(view: LimitsView, value: Any) -> None:
        check(name, value)
        setattr(view.limits, field, kept(value))
        view._touch()

    return property(read, write, doc=doc)


def _argument(name: str, doc: str) -> Any:
    """Return the read-only property ``name`` for the Trainer's argument of this name."""

    def read(view: LimitsView) -> Any:
        return getattr(view.settings, name)

    def write(view: LimitsView, value: Any) -> None:
        # With the argument ``obj``, Python would add a suggestion to the message.
        raise AttributeError(
            f"trainer.{name} cannot be changed. Write Trainer({name}={shown(value)}) instead.", name=name
        )

    return property(read, write, doc=doc)


def _minus_one(limit: float) -> int:
    return -1 if limit == ENDLESS else int(limit)


def _batches(stage: str, part: str) -> Any:
    """Return the property ``limit_<stage>_batches``. ``part`` is a noun for the property's docstring."""
    return _limit(f"limit_{stage}_batches", f"Batches of {part}: a count (int) or a fraction (float).")


class LimitsView:
    """The Trainer's arguments as properties.

    Limits are writable. A written value is checked like the Trainer's argument, and ``None`` means the argument's
    default. A change takes effect at the next batch; for ``limit_*_batches``, at the next pass over the data. A change
    also applies to later runs of this Trainer.
    """

    settings: Settings
    limits: Limits
    progress: Progress
    _run_parts: Run | None
    _profiler: Any

    max_epochs: int | None = _limit("max_epochs", "Epochs at most; -1: no limit.", _minus_one)
    min_epochs: int | None = _limit("min_epochs", "Epochs at least.")
    max_steps: int = _limit("max_steps", "Optimizer steps at most; -1: no limit.", _minus_one)
    min_steps: int | None = _limit(
        "min_steps", "Optimizer steps at least; ``None``: no such limit.", lambda limit: limit or None
    )
    log_every_n_steps: int = _limit("log_every_n_steps", "Optimizer steps from one flush of logged values to the next.")
    check_val_every_n_epoch: int | None = _limit(
        "check_val_every_n_epoch", "Validation runs in every n-th epoch; ``None``: batches are counted across epochs."
    )
    limit_train_batches: int | float = _batches("train", "a training epoch")
    limit_val_batches: int | float = _batches("val", "each validation loader")
    limit_test_batches: int | float = _batches("test", "each test loader")
    limit_predict_batches: int | float = _batches("predict", "each prediction loader")
    reload_dataloaders_every_n_epochs: int = _limit(
        "reload_dataloaders_every_n_epochs",
        "Loaders that a hook returns are built again every so many epochs; 0: never.",
    )

    num_sanity_val_steps: float = _limit(
        "num_sanity_val_steps", "Validation batches of the sanity check; ``inf``: all."
    )

    barebones: bool = _argument("barebones", "Whether everything is off that costs time beyond the step.")
    enable_autolog_hparams: bool = _argument("enable_autolog_hparams", "Whether hyperparameters are logged.")
    fast_dev_run: int | bool = _argument(
        "fast_dev_run", "How many batches of every stage a trial runs; False: no trial."
    )
    gradient_clip_algorithm: str | None = _argument("gradient_clip_algorithm", '"norm", "value", or ``None``: "norm".')
    gradient_clip_val: float | None = _argument(
        "gradient_clip_val", "Gradients are clipped to it; ``None``: not at all."
    )
    overfit_batches: int | float = _argument(
        "overfit_batches", "On how many batches alone the fit trains; 0.0: on all."
    )

    @property
    def val_check_batch(self) -> float | None:
        """The number of training batches between validations. It is ``inf`` if the fit validates at the end of each
        epoch and the length of an epoch is unknown.

        It is ``None`` if ``val_check_interval`` is a duration, or if it is a fraction and the training loader does not
        exist yet.
        """
        if self.limits.val_check_seconds is not None:
            return None
        interval, count = self.limits.val_check_interval, self.progress.num_training_batches
        if isinstance(interval, int):
            return interval
        if not count:
            return None
        return count if count == ENDLESS else max(1, int(count * interval))

    @property
    def profiler(self) -> Any:
        """The profiler. Without a profiler, this is an object with the same methods that measures nothing."""
        if self._profiler is None:
            self._profiler = load("drivetrain.profilers:PassThroughProfiler")()
        return self._profiler

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of batches per optimizer step. A change takes effect after the current optimizer step."""
        return self.limits.accumulate

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        run = self._run_parts
        by_hand = run is not None and run.progress.loop_stage is not None and not run.module.automatic_optimization
        if by_hand and value != 1:
            raise ConfigurationError(
                f"trainer.accumulate_grad_batches = {value!r} would do nothing under manual optimization. "
                "Call optimizer.step() in every n-th training_step only."
            )
        check("accumulate_grad_batches", value)
        self.limits.accumulate = value
        self._touch()

    @property
    def val_check_interval(self) -> int | float | timedelta:
        """The interval between validations: training batches (int), a fraction of the epoch (float), or a duration."""
        seconds = self.limits.val_check_seconds
        return self.limits.val_check_interval if seconds is None else timedelta(seconds=seconds)

    @val_check_interval.setter
    def val_check_interval(self, value: int | float | str | timedelta | dict[str, int]) -> None:
        check("val_check_interval", value)
        self.limits.val_check_interval, self.limits.val_check_seconds = val_interval_of(value)
        self._touch()

    def _touch(self) -> None:
        """Let a running loop use the changed values from the next batch on."""
        if self._run_parts is not None:
            self._run_parts.stale = True
