"""The parts of a run (:class:`Run`), which the functions of the loops receive, and the limits of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from drivetrain import parity
from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.data.feed import BatchIterator
from drivetrain.engine.engine import Engine
from drivetrain.errors import ConfigurationError
from drivetrain.logbook.logbook import Logbook, Row
from drivetrain.loops.loaders import LOADER_WORDS, Loaders
from drivetrain.loops.progress import Progress
from drivetrain.loops.window import Window
from drivetrain.module.hooks import Call, HookTable
from drivetrain.module.optimizers import LightningOptimizer
from drivetrain.module.trainable import TrainableModule
from drivetrain.settings import Settings, val_interval_of
from drivetrain.strategies.strategy import Strategy

ENDLESS = float("inf")


@dataclass(slots=True)
class Limits:
    """The Trainer's arguments that limit a run, with their defaults filled in; ``inf`` means no limit.

    User code may change the limits through the Trainer during a run. A change of ``*_batches`` takes effect at the next
    pass over the data. Any other change takes effect at the next batch.

    Attributes:
        val_check_interval: a number of batches (int) or a fraction of the epoch (float); unused if
            ``val_check_seconds`` is set.
    """

    max_epochs: float
    min_epochs: int
    max_steps: float
    min_steps: int
    train_batches: int | float
    val_batches: int | float
    test_batches: int | float
    predict_batches: int | float
    sanity_batches: float
    val_check_interval: int | float
    val_check_seconds: float | None
    check_val_every_n_epoch: int | None
    accumulate: int
    log_every_n_steps: int
    inference_mode: bool
    reload_every: int

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """Return the limits for ``settings``."""
        fast, overfit = int(settings.fast_dev_run), settings.overfit_batches
        interval, seconds = val_interval_of(None if fast else settings.val_check_interval)
        given = {field: kept(getattr(settings, name)) for name, (field, kept) in ARGUMENTS.items()}
        found = cls(**given, val_check_interval=interval, val_check_seconds=seconds)
        has_end = settings.max_steps != -1 or settings.max_time is not None or settings.has_own_end
        if settings.max_epochs is None and not has_end:
            found.max_epochs = 1000
        if settings.min_epochs is None and settings.min_steps:
            found.min_epochs = 1
        if overfit:
            found.train_batches = found.val_batches = overfit
        if settings.barebones:
            found.sanity_batches = found.log_every_n_steps = 0
        if fast:
            found.max_epochs, found.min_epochs, found.max_steps, found.min_steps = 1, 0, fast, 0
            found.train_batches = found.val_batches = found.test_batches = found.predict_batches = fast
            found.sanity_batches, found.check_val_every_n_epoch, found.log_every_n_steps = 0, 1, 1
        return found

    def batches(self, stage: str) -> int | float:
        """Return the limit on the number of batches of "fit", "validate", "test" or "predict"."""
        return getattr(self, f"{LOADER_WORDS[stage]}_batches")


def _same(value: Any) -> Any:
    return value


def _or(default: Any) -> Callable[[Any], Any]:
    return lambda value: default if value is None else value


def _endless(value: int | None) -> float:
    return ENDLESS if value is None or value == -1 else value


ARGUMENTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "max_epochs": ("max_epochs", _endless),
    "min_epochs": ("min_epochs", _or(0)),
    "max_steps": ("max_steps", _endless),
    "min_steps": ("min_steps", _or(0)),
    "limit_train_batches": ("train_batches", _or(1.0)),
    "limit_val_batches": ("val_batches", _or(1.0)),
    "limit_test_batches": ("test_batches", _or(1.0)),
    "limit_predict_batches": ("predict_batches", _or(1.0)),
    "num_sanity_val_steps": ("sanity_batches", lambda value: 2 if value is None else _endless(value)),
    "check_val_every_n_epoch": ("check_val_every_n_epoch", _same),
    "accumulate_grad_batches": ("accumulate", _same),
    "log_every_n_steps": ("log_every_n_steps", _or(50)),
    "inference_mode": ("inference_mode", _same),
    "reload_dataloaders_every_n_epochs": ("reload_every", _same),
}
"""Argument of the Trainer -> the field of :class:`Limits` that stores the argument, and a function that converts it."""


@dataclass
class RunOptimizers:
    """The optimizers of a run, as user code sees them, and the hooks on the optimizers.

    Attributes:
        handles: the result of ``self.optimizers()``.
        made: whether ``configure_optimizers`` has run, so that a checkpoint can contain the optimizers.
        waiting: optimizers that user code has set, and that replace the present optimizers at the next batch.
        unbinders: functions that remove the hooks of a bound step from the optimizers.
        manual_backward: the function that the module's method ``manual_backward`` calls; set during manual
            optimization.
    """

    handles: list[LightningOptimizer] = field(default_factory=list)
    made: bool = False
    waiting: list[Optimizer] | None = None
    unbinders: list[Callable[[], None]] = field(default_factory=list)
    manual_backward: Callable[..., Any] | None = None


@dataclass
class KeptStates:
    """States of a fit at earlier points. A checkpoint may contain these states, so that a run resumes at such a point:
    see ``restart.py``.

    Attributes:
        saves_on_exception: whether a callback saves a checkpoint after an exception.
        window_start: the loop's state at the start of the window; kept only if ``saves_on_exception``.
        unchanged: returns true if no parameter has changed since ``window_start``.
        stepping: whether an optimizer is changing parameters; set only if ``saves_on_exception``. step_hooks: the hooks
            before and after an optimizer's step that set ``stepping``.
        before_validation: the state before the running validation, for a checkpoint saved inside the validation.
            draws_undone: whether the random generators will be restored after this validation. A checkpoint saved
            inside the validation then contains the generators' states from before the validation.
        at_epoch_start: the states of callbacks and buffers before ``on_train_epoch_start``, if ``saves_on_exception``.
        token: a unique name of this fit, equal on all ranks; set only if ``saves_on_exception``.
    """

    saves_on_exception: bool = False
    window_start: dict[str, Any] | None = None
    unchanged: Callable[[], bool] | None = None
    stepping: bool = False
    step_hooks: list[Callable[..., None]] = field(default_factory=list)
    before_validation: dict[str, Any] = field(default_factory=dict)
    draws_undone: bool = False
    at_epoch_start: dict[str, Any] = field(default_factory=dict)
    token: str = ""


@dataclass
class Stopping:
    """Requests to end a fit, and what the ranks have agreed about its end.

    Attributes:
        stopper: a :class:`drivetrain.loops.stop.Stop`, which handles signals and time limits.
        agreed: whether the ranks have agreed to stop.
        ends_together: whether all ranks end the fit after the same batch, so that they can use collectives at the end.
        delay_reported: whether the run has logged that ``min_epochs`` or ``min_steps`` delay the end.
    """

    stopper: Any = None
    agreed: bool = False
    ends_together: bool = False
    delay_reported: bool = False


class ValidationClock:
    """Measures the time since the last validation ended, or since training began."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart the clock."""
        self._began = time.monotonic()
        self._answer = (-1, False)  # the argument ``batches`` and the result of the last is_over()

    def is_over(self, seconds: float, batches: int, strategy: Strategy) -> bool:
        """Whether ``seconds`` have passed on rank 0's clock. All calls during one batch return the same result."""
        if self._answer[0] != batches:  # if equal, an earlier call during this batch has set the result
            self._answer = batches, strategy.broadcast(time.monotonic() - self._began >= seconds)
        return self._answer[1]


@dataclass
class Run:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``.

    Attributes:
        log: a function that passes metrics and a step to the loggers; ``None`` without loggers.
        batches: the pass over the training loader, if ``training_step`` takes ``dataloader_iter``; else ``None``.
        window: the state of the current window (the batches of one optimizer step).
        restart: the loop's state from a checkpoint (see ``restart.py``); ``None`` after the loop has resumed.
        resumed_from: the path of the checkpoint of ``restart``, for messages.
        restored: whether the loop has restored everything from ``restart``, except the position in the training data.
        stale: whether code has changed a limit, a callback, a logger or an optimizer. If so, the loop binds its step
            again at the next batch.
        validates_last: whether a validation at the end of an epoch runs after the epoch's end hooks.
        uneven: the :class:`drivetrain.loops.uneven.UnevenInputs` of the pass over the training data; ``None`` with one
            rank.
        stop: ``None`` until a request to end the fit, then ``stopping.stopper``, which the loop calls at the end of
            each batch.
        splitter: runs batches in parts after an out-of-memory error; ``None`` without ``split_on_oom``.
        graphs: the recorded steps, a :class:`drivetrain.loops.graphs.GraphedSteps`; ``None`` without ``cuda_graphs``.
        transfer: ``(move, hooks)`` from :meth:`drivetrain.module.hooks.HookTable.bind_transfer`.
        loaders: creates the loaders on first use.
    """

    engine: Engine
    module: TrainableModule
    hooks: HookTable
    book: Logbook
    progress: Progress
    limits: Limits
    settings: Settings
    transfer: tuple[Call, Call | None]
    loaders: Loaders
    log: Callable[[Mapping[str, float], int], None] | None
    optimizers: RunOptimizers = field(default_factory=RunOptimizers)
    batches: BatchIterator | None = None
    window: Window = field(default_factory=lambda: Window(parity.current().undersized_windows))
    restart: dict[str, Any] | None = None
    resumed_from: str | None = None
    restored: bool = False
    kept: KeptStates = field(default_factory=KeptStates)
    stale: bool = False
    clock: ValidationClock = field(default_factory=ValidationClock)
    stopping: Stopping = field(default_factory=Stopping)
    validates_last: bool = False
    uneven: Any = None
    stop: Any = None
    splitter: Any = None
    graphs: Any = None

    def __post_init__(self) -> None:
        # Pinned memory is not used with a transfer hook, because the hook may write into the batch while the device
        # still copies it.
        self.loaders.pins = self.transfer[1] is None and self.engine.accelerator.supports_pinned_memory

    def mark_stale(self) -> None:
        """Make the loop bind its step again at the next batch; called after a part of the run was changed."""
        self.stale = True

    def publish(self, rows: list[Row], step: int, read_all: bool = False) -> list[Row]:
        """Read the values of ``rows`` from the device, pass the values to the loggers, and return the rows that were
        read.

        If ``read_all``, the function also reads values that neither loggers nor progress bars show.
        """
        log = self.log
        if log is None:
            self.keep(rows, step)
        if log is None and not read_all:
            rows = [row for row in rows if row.entry.to_bar]
        if not rows:
            return rows
        read = self.book.read(rows)
        if nan := [row.name for row in read if row.value != row.value]:
            self.hooks.notify("logged_nan", nan, step)
        if log is not None and (metrics := {row.name: row.value for row in read if row.entry.to_logger}):
            log(metrics, step)
        return read

    def keep(self, rows: list[Row], step: int) -> None:
        """Called if there are no loggers. Rank 0 adds the values that loggers would get to its history."""
        values = {row.name: row.value for row in rows if row.entry.to_logger}
        if values and self.engine.strategy.is_global_zero:
            self.book.history.add(values, step, self.progress.current_epoch)

    def wrap_optimizers(self) -> None:
        """Create the objects that the module's ``self.optimizers()`` returns."""
        self.unbind()
        own = self.engine.strategy.optimizers
        self.optimizers.made = True
        self.optimizers.handles = [LightningOptimizer(optimizer, self.module) for optimizer in own]

    def swap_optimizers(self) -> None:
        """Use the optimizers that user code has set on the Trainer or on its strategy since the last call."""
        own, bound = self.engine.strategy.optimizers, self.optimizers
        if bound.made and bound.waiting is None:
            changed = list(map(id, own)) != [id(handle.optimizer) for handle in bound.handles]
            bound.waiting = own if changed else None
        if bound.waiting is not None:
            self.engine.bind_optimizers(bound.waiting, self.engine.strategy.lr_scheduler_configs)
            bound.waiting = None
            self.wrap_optimizers()

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that no optimizer step has used yet."""
        if self.module.automatic_optimization:
            return self.window.batches_done > 0 or self.window.holds_own
        # the number of batches does not show which optimizers have used their gradients
        if len(self.optimizers.handles) > 1:
            return any(parameter.grad is not None for parameter in self.module.parameters())
        return self.window.batches_with_gradients > 0

    def unbind(self) -> None:
        """Remove the bound step's hooks from the optimizers, so that the optimizers are as the user created them."""
        while self.optimizers.unbinders:
            self.optimizers.unbinders.pop()()
        self.optimizers.manual_backward = None

    def let_go(self) -> None:
        """Drop the state that only a running loop needs. If the loop has not yet restored a checkpoint's state, that
        state is kept for the next checkpoint.
        """
        self.kept.window_start = self.batches = None
        self.hooks.observers.clear()
        if self.splitter is not None:
            self.splitter.passes.end()
            self.splitter = None
        if self.graphs is not None:
            self.graphs.end()
        if self.restored:
            self.restart = None

    def validates(self) -> bool:
        """Whether the fit validates: the module has a validation step, and there is at least one validation batch.

        Loaders that a hook returns are created when a validation is due. Until then, this method assumes that the
        loaders have batches.
        """
        return not self.why_not_validated()

    def why_not_validated(self) -> str:
        """Return a sentence that explains why the fit does not validate, with a space at its end; "" if the fit
        validates.
        """
        loaders = self.loaders
        if self.limits.val_batches == 0:
            why = "limit_val_batches is 0"
        elif not overrides(self.module, "validation_step", TrainableModule):
            why = f"{type(self.module).__name__} has no validation_step"
        elif not loaders.available("validate"):
            why = "there is no validation loader"
        elif loaders.is_known("validate") and not any(each.num_batches for each in loaders.evaluation("validate")):
            why = "the validation loaders have no batch"
        else:
            return ""
        return f"This fit does not validate: {why}. "

    def agree_to_stop(self) -> None:
        """If a rank was asked to stop, ask all ranks to stop. All ranks must call this method at the same points."""
        if self.engine.strategy.facts.is_distributed:
            stop = self.engine.strategy.reduce_boolean_decision(self.progress.should_stop, all=False)
            self.progress.ask_to_stop(stop)
            self.stopping.agreed = stop

    def stop_is_delayed(self) -> bool:
        """Whether a request to stop must wait, because the run has not reached ``min_epochs`` or ``min_steps``."""
        progress, limits = self.progress, self.limits
        return progress.epochs_done < limits.min_epochs or progress.global_step < limits.min_steps

    def may_stop(self) -> bool:
        """Whether a request may stop the run: the run has reached min_epochs and min_steps, and all ranks know of the
        request.

        If one rank stopped before all ranks know of the request, the other ranks would wait in a collective.
        """
        progress, limits = self.progress, self.limits
        if self.engine.strategy.facts.is_distributed and not self.stopping.agreed:
            return False
        # current_epoch is the number of completed epochs
        allowed = progress.current_epoch >= limits.min_epochs and progress.global_step >= limits.min_steps
        if not allowed and not self.stopping.delay_reported:
            self.stopping.delay_reported = True
            rank_zero_info(
                f"Asked to stop in epoch {progress.current_epoch} at step {progress.global_step}; training continues "
                f"until min_epochs={limits.min_epochs} and min_steps={limits.min_steps} are reached."
            )
        return allowed

    def training_done(self) -> bool:
        """Whether training is over, so that no further epoch begins."""
        progress, limits = self.progress, self.limits
        return (
            progress.current_epoch >= limits.max_epochs
            or progress.global_step >= limits.max_steps
            or progress.num_training_batches == 0
            or (progress.should_stop and self.may_stop())
        )


def val_check_every(limits: Limits, num_batches: float) -> float:
    """Return the number of training batches between validations; ``inf``: validate after an epoch's last batch.

    Raises:
        ConfigurationError: the interval is longer than the epoch, or requires a loader with a length.
    """
    interval = limits.val_check_interval
    if limits.val_check_seconds is not None:
        return ENDLESS
    if isinstance(interval, int):
        if limits.check_val_every_n_epoch is not None and interval > num_batches:
            raise ConfigurationError(
                f"Trainer(val_check_interval={interval}) exceeds the {num_batches:.0f} training batches of an epoch. "
                "Write a smaller number, or check_val_every_n_epoch=None to count batches across epochs. [DT1022]"
            )
        return interval
    if interval == 1.0 and (limits.check_val_every_n_epoch is not None or num_batches == ENDLESS):
        return ENDLESS
    if num_batches == ENDLESS:
        raise ConfigurationError(
            f"Trainer(val_check_interval={interval}) is a fraction, but the training loader has no length. "
            "Write a number of batches. [DT1023]"
        )
    return max(1, int(num_batches * interval))
