"""What one run is made of: the parts, handed to the loops together. It holds no Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.engine import Engine
from drivetrain.errors import ConfigurationError
from drivetrain.hooks import Call, HookTable
from drivetrain.logbook import Logbook, Row
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import Progress
from drivetrain.module import LightningModule
from drivetrain.rank_zero import rank_zero_info
from drivetrain.settings import Settings

ENDLESS = float("inf")


@dataclass(frozen=True)
class Limits:
    """The Trainer's arguments about when and how much, with their defaults filled in; ``inf`` means no limit."""

    max_epochs: float
    min_epochs: int
    max_steps: float
    min_steps: int
    train_batches: int | float
    val_batches: int | float
    test_batches: int | float
    sanity_batches: float
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    accumulate: int
    log_every_n_steps: int
    inference_mode: bool

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits that ``settings`` mean (spec 3.1)."""
        if settings.fast_dev_run:
            batches = int(settings.fast_dev_run)
            return cls(
                max_epochs=1, min_epochs=0, max_steps=batches, min_steps=0,
                train_batches=batches, val_batches=batches, test_batches=batches, sanity_batches=0,
                val_check_interval=1.0, check_val_every_n_epoch=1, accumulate=settings.accumulate_grad_batches,
                log_every_n_steps=1, inference_mode=settings.inference_mode,
            )  # fmt: skip
        max_epochs = settings.max_epochs
        if max_epochs is None:
            max_epochs = 1000 if settings.max_steps == -1 else -1
        sanity = 2 if settings.num_sanity_val_steps is None else settings.num_sanity_val_steps
        min_epochs = settings.min_epochs
        if min_epochs is None:
            min_epochs = 1 if settings.min_steps else 0
        return cls(
            max_epochs=ENDLESS if max_epochs == -1 else max_epochs,
            min_epochs=min_epochs,
            max_steps=ENDLESS if settings.max_steps == -1 else settings.max_steps,
            min_steps=settings.min_steps or 0,
            train_batches=_default(settings.limit_train_batches, 1.0),
            val_batches=_default(settings.limit_val_batches, 1.0),
            test_batches=_default(settings.limit_test_batches, 1.0),
            sanity_batches=ENDLESS if sanity == -1 else sanity,
            val_check_interval=_default(settings.val_check_interval, 1.0),
            check_val_every_n_epoch=settings.check_val_every_n_epoch,
            accumulate=settings.accumulate_grad_batches,
            log_every_n_steps=_default(settings.log_every_n_steps, 50),
            inference_mode=settings.inference_mode,
        )


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


@dataclass
class Run:
    """One call of ``fit``, ``validate`` or ``test``.

    Attributes:
        log: gives flushed metrics to the loggers, at a step; ``None`` where there are none.
        unlogged: names of step values that no logger has seen so far.
        cleanups: called once when the run ends, however it ends.
        transfer: ``(move, hooks)`` as :func:`drivetrain.hooks.bind_transfer` returns them.
        loaders: makes the loaders on first use.
    """

    engine: Engine
    module: LightningModule
    hooks: HookTable
    book: Logbook
    progress: Progress
    limits: Limits
    settings: Settings
    transfer: tuple[Call, Call | None]
    loaders: Loaders
    log: Callable[[Mapping[str, float], int], None] | None
    cleanups: list[Callable[[], None]] = field(default_factory=list)
    unlogged: set[str] = field(default_factory=set)
    told_to_go_on: bool = False

    def publish(self, rows: list[Row], step: int, read_all: bool = False) -> list[Row]:
        """Read ``rows`` from the device and give the loggers what is theirs; return what was read.

        What neither a logger nor the bar wants is not read at all, unless ``read_all``.
        """
        log = self.log
        if log is None and not read_all:
            rows = [row for row in rows if row.entry.to_bar]
        if not rows:
            return rows
        read = self.book.read(rows)
        if log is not None and (metrics := {row.name: row.value for row in read if row.entry.to_logger}):
            log(metrics, step)
        return read

    def validates(self) -> bool:
        """Whether the fit validates: there are a step and at least one batch for it."""
        if self.limits.val_batches == 0 or not self.loaders.defined("validate"):
            return False
        return any(source.num_batches for source in self.loaders.evaluation("validate"))

    def may_stop(self) -> bool:
        """Whether a request to stop may be honoured: min_epochs and min_steps are reached (trap T29)."""
        progress, limits = self.progress, self.limits
        # inside an epoch the running one does not count, at its end it does: current_epoch rises after its hooks
        allowed = progress.current_epoch >= limits.min_epochs and progress.global_step >= limits.min_steps
        if not allowed and not self.told_to_go_on:
            self.told_to_go_on = True
            rank_zero_info(
                f"Asked to stop in epoch {progress.current_epoch} at step {progress.global_step}; training goes on "
                f"until min_epochs={limits.min_epochs} and min_steps={limits.min_steps} are reached."
            )
        return allowed

    def training_done(self) -> bool:
        """Whether no further epoch must begin."""
        progress, limits = self.progress, self.limits
        return (
            progress.current_epoch >= limits.max_epochs
            or progress.global_step >= limits.max_steps
            or progress.num_training_batches == 0
            or (progress.should_stop and self.may_stop())
        )


def val_check_every(limits: Limits, num_batches: float) -> float:
    """After how many training batches validation is due (trap T17); ``inf``: after the last batch of an epoch.

    Raises:
        ConfigurationError: the interval never occurs, or needs a length that the loader has not.
    """
    interval = limits.val_check_interval
    if isinstance(interval, int):
        if limits.check_val_every_n_epoch is not None and interval > num_batches:
            raise ConfigurationError(
                f"Trainer(val_check_interval={interval}) exceeds the {num_batches:.0f} training batches of an epoch. "
                "Write a smaller number, or check_val_every_n_epoch=None to count batches across epochs."
            )
        return interval
    if interval == 1.0 and (limits.check_val_every_n_epoch is not None or num_batches == ENDLESS):
        return ENDLESS
    if num_batches == ENDLESS:
        raise ConfigurationError(
            f"Trainer(val_check_interval={interval}) is a fraction, but the training loader has no length. "
            "Write a number of batches."
        )
    return max(1, int(num_batches * interval))
