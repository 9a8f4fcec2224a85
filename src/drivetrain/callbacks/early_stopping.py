"""Stop training when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from drivetrain.base.introspect import overrides, reads
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import COUNT, Form, WrongForm, entry, expect, number
from drivetrain.base.spelling import warn_if_misspelt
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.callbacks._checkpoint_arguments import acts_at_epoch_end, mode_or_default, not_logged
from drivetrain.errors import NotLoggedError, arguments_checked, check_count, is_number, number_of, shown, wrong_value

_COUNTS = ("wait_count", "stopped_epoch", "patience")
_CRITERIA = ("patience", "min_delta", "stopping_threshold", "divergence_threshold", "check_finite")


class EarlyStoppingReason(str, Enum):
    """The reason why an EarlyStopping stopped the run."""

    NOT_STOPPED = "not_stopped"
    STOPPING_THRESHOLD = "stopping_threshold"
    DIVERGENCE_THRESHOLD = "divergence_threshold"
    PATIENCE_EXHAUSTED = "patience_exhausted"
    NON_FINITE_METRIC = "non_finite_metric"


def _reason(value: Any, place: str) -> None:
    if value not in [each.value for each in EarlyStoppingReason]:
        raise WrongForm(place, f"is {shown(value)}, which is no EarlyStoppingReason")


_STOPPED: Form = {"stopping_reason": (str, _reason), "stopping_reason_message?": str, "stopped_with": dict}


class EarlyStopping(Callback):
    """Asks the Trainer to stop when ``monitor`` has not improved for ``patience`` checks.

    Args:
        monitor: the logged name to monitor.
        min_delta: a value is an improvement if it is better than the best value by more than ``min_delta``.
        patience: the number of checks without improvement after which the callback stops training. A check is one
            validation or one epoch.
        verbose: log each improvement.
        mode: "min" if lower values are better, "max" if higher values are better; ``None`` means "min".
        strict: raise an error if ``monitor`` was not logged; False logs a warning instead.
        check_finite: stop at once when the value is NaN or infinite.
        stopping_threshold: stop at once when the value is better than this threshold.
        divergence_threshold: stop at once when the value is worse than this threshold.
        check_on_train_epoch_end: True checks at the end of each training epoch, False after each validation. ``None``
            means True if the run does not validate, or validates at the end of each epoch; otherwise False.
        log_rank_zero_only: log on global rank 0 only.

    Attributes:
        best_score: the best value so far.
        wait_count: the number of checks since the last improvement.
        stopped_epoch: the epoch in which the callback stopped the fit; 0 if the callback has not stopped it.
        stopping_reason, stopping_reason_message: why the callback stopped the last fit.

    If the callback has stopped a run, a resumed run stops again, and the callback logs the reason. The resumed run
    continues if ``patience``, ``min_delta`` or a threshold has changed, or if ``max_epochs`` was raised.

    If the callback requests a stop before ``min_epochs`` and ``min_steps`` are reached, the fit ends when both are
    reached. The callback never stops the sanity check or a ``fast_dev_run``.

    Raises:
        ConfigurationError: an argument is wrong; or ``strict`` is True, and ``monitor`` was not logged before a check.
            If ``max_steps`` ends the fit before its first validation, the callback only warns.
    """

    mode_dict: ClassVar[dict[str, Callable[..., Any]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    monitors = True
    _told_step = False
    needs_every_rank = True

    @arguments_checked
    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str | None = None,
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        mode = mode_or_default("EarlyStopping", mode, monitor)
        if not isinstance(monitor, str):
            raise wrong_value("EarlyStopping", "monitor", monitor, "the name of a logged value", 'monitor="val_loss"')
        check_count("EarlyStopping", "patience", patience, otherwise=3)
        for name, value in (
            ("min_delta", min_delta), ("stopping_threshold", stopping_threshold),
            ("divergence_threshold", divergence_threshold),
        ):  # fmt: skip
            if not (is_number(value) or (value is None and name != "min_delta")):
                raise wrong_value("EarlyStopping", name, value, "a number", f"{name}=0.01")
        if min_delta < 0:
            rank_zero_warn(
                f"EarlyStopping(min_delta={min_delta!r}): the sign has no meaning, because mode says which direction "
                f"is better. Write min_delta={-min_delta!r}."
            )
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        if mode == "min" and overrides(self, "_evaluate_stopping_criteria", EarlyStopping):
            # as in Lightning: an override subtracts min_delta also if lower values are better
            self.min_delta = -self.min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._max_epochs: int | None = None  # the Trainer's max_epochs when this callback stopped the run
        self._resumed: dict[str, Any] = {}  # the state in the checkpoint, if this callback had stopped that run

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in (*_COUNTS, "best_score")}
        if self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            state["stopping_reason"] = self.stopping_reason.value
            state["stopping_reason_message"] = self.stopping_reason_message
            state["stopped_with"] = {name: getattr(self, name) for name in _CRITERIA} | {"max_epochs": self._max_epochs}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        counts = {name: entry(state_dict, name, COUNT) for name in _COUNTS}
        self.best_score = torch.as_tensor(entry(state_dict, "best_score", (Tensor, int, float, number)))
        self.wait_count, self.stopped_epoch = counts["wait_count"], counts["stopped_epoch"]
        if "stopping_reason" in state_dict:
            expect(state_dict, _STOPPED)
            self._resumed = dict(state_dict)
        elif counts["patience"] != self.patience:
            rank_zero_info(
                f"EarlyStopping: the checkpoint was saved with patience={counts['patience']}. This run uses "
                f"patience={self.patience}."
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # wait_count and best_score keep the values of an earlier fit
            self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None
            self.stopped_epoch, self._resumed, self._told_step = 0, {}, False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop a resumed run again, if this callback had stopped it before and no argument has changed."""
        state, self._resumed = self._resumed, {}
        if not state:
            return
        why, saved = state.get("stopping_reason_message") or state["stopping_reason"], state["stopped_with"]
        changed = [
            f"{name} is {getattr(self, name)} instead of {saved[name]}"
            for name in _CRITERIA
            if name in saved and saved[name] != getattr(self, name)
        ]
        if _more_epochs(trainer.max_epochs, saved.get("max_epochs")):
            changed.append(f"max_epochs is {trainer.max_epochs} instead of {saved['max_epochs']}")
        if changed:
            self.stopped_epoch = 0
            rank_zero_info(
                f"EarlyStopping({self.monitor!r}) had stopped this run: {why} Now {', and '.join(changed)}, so the run "
                "continues."
            )
            return
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason(state["stopping_reason"]), why
        self._max_epochs = saved.get("max_epochs")
        trainer.should_stop = True
        rank_zero_info(
            f"EarlyStopping({self.monitor!r}) had stopped this run in epoch {self.stopped_epoch}: {why} The run stops "
            "again. To continue training, change its patience or a threshold, or raise max_epochs."
        )

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        warn_if_misspelt(f"EarlyStopping({self.monitor!r})", self.monitor, trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if acts_at_epoch_end(self.check_on_train_epoch_end, trainer) and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not acts_at_epoch_end(self.check_on_train_epoch_end, trainer) and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def _should_skip_check(self, trainer: Trainer) -> bool:
        """Return whether to skip the check. Programs override this method, although its name is private."""
        return trainer.sanity_checking or trainer.progress.fn != "fit"

    _check_on_train_epoch_end: bool | None = reads(
        "check_on_train_epoch_end", "Public to libraries, which read and set this name.", writable=True
    )

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        """Check the metric, and request a stop if a criterion is met. Programs call this method, although its name is
        private.
        """
        if trainer.progress.fn != "fit":
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            message = not_logged("EarlyStopping", self.monitor, metrics, trainer)
            if _ended_before_validating(trainer):
                message += " Training ended before the first validation."
            elif self.strict:
                raise NotLoggedError(message)
            rank_zero_warn(message)
            return
        if trainer.fast_dev_run:
            return
        if not self._told_step and trainer.logbook.is_of_one_step(self.monitor):
            self._told_step = True
            rank_zero_warn(
                f"EarlyStopping watches {self.monitor!r}, which is logged for each step, so it judges by the last "
                f"batch alone. Write self.log({self.monitor!r}, ..., on_epoch=True), or watch a value of validation."
            )
        stops, judgement = self._evaluate_stopping_criteria(metrics[self.monitor])
        if stops:
            self.stopping_reason_message = judgement
            self.stopped_epoch, self._max_epochs = trainer.current_epoch, trainer.max_epochs
            trainer.should_stop = True
        if judgement and (self.verbose or stops):
            rank_zero_info(judgement)

    @property
    def monitor_op(self) -> Callable[..., Any]:
        """``torch.lt`` or ``torch.gt``: returns whether the first argument is better than the second."""
        return self.mode_dict[self.mode]

    def _better(self, value: float, than: float) -> bool:
        return value < than if self.mode == "min" else value > than

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Check one value. Return whether to stop, and a sentence that says why. Libraries override this method despite
        its private name.

        In an override, ``self.min_delta`` is negative if lower values are better, as in Lightning.
        """
        reason, message = self._judge(float(current))
        if reason is EarlyStoppingReason.NOT_STOPPED:
            return False, message or None
        self.stopping_reason = reason
        return True, message

    def _judge(self, value: float) -> tuple[EarlyStoppingReason, str]:
        """Check one value. Return whether to stop, the reason as a constant, and the reason as a sentence."""
        name = self.monitor
        if self.check_finite and not math.isfinite(value):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{name} is {value}: stopping."
        passed = f"{name} = {value:.6g} has passed"
        if (threshold := self.stopping_threshold) is not None and self._better(value, threshold):
            return EarlyStoppingReason.STOPPING_THRESHOLD, f"{passed} stopping_threshold={threshold}: stopping."
        if (threshold := self.divergence_threshold) is not None and self._better(threshold, value):
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, f"{passed} divergence_threshold={threshold}: stopping."
        margin = abs(self.min_delta) if self.mode == "min" else -abs(self.min_delta)
        best = float(self.best_score)
        if self._better(value + margin, best):
            current = torch.tensor(value, dtype=torch.float64)
            message = self._improvement_message(current)  # the message needs the previous best_score
            self.best_score, self.wait_count = current, 0
            return EarlyStoppingReason.NOT_STOPPED, message
        self.wait_count += 1
        least = f", min_delta={abs(self.min_delta):g}" if self.min_delta else ""
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, ""
        message = (
            f"{name} has not improved on {best:.6g} for {number_of(self.wait_count, 'check')} (last value {value:.6g}, "
            f"mode={self.mode!r}{least}): stopping."
        )
        return EarlyStoppingReason.PATIENCE_EXHAUSTED, message

    def _improvement_message(self, current: Tensor) -> str:
        """Return a sentence that says by how much ``current`` improves on ``best_score``. Programs override this method
        despite its private name.
        """
        return f"{self.monitor} improved from {float(self.best_score):.6g} to {float(current):.6g}."


def _ended_before_validating(trainer: Trainer) -> bool:
    """Return whether ``max_steps`` or a request to stop ends the fit before its first validation."""
    progress = trainer.progress
    return trainer.enable_validation and progress.epoch_cut and not any(progress.eval_steps.get("validate", []))


def _more_epochs(now: int | None, then: Any) -> bool:
    """Whether ``max_epochs`` was raised; ``None`` and -1 mean no limit."""
    limited_then = isinstance(then, int) and then >= 0
    return limited_then and (now is None or now < 0 or now > then)
