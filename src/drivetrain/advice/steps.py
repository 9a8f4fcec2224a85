"""Warnings about optimizers and schedulers that never step or step too often, and about limits that a fit never
reaches. A window is the batches of one optimizer step.
"""

from __future__ import annotations

import math
from typing import Any

from drivetrain.advice.watch import Watch
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.tree import gradients_of, parameters_of
from drivetrain.errors import ConfigurationError, number_of
from drivetrain.loops.run import ENDLESS, Run
from drivetrain.module.optimizers import LRSchedulerConfig


class _EpochWatch(Watch):
    """Base class that records the counters at the start of each epoch.

    Attributes:
        complete: whether this run trains the complete epoch; false if the run has resumed inside the epoch.
        steps, windows: ``global_step`` and the number of finished windows at the start of the epoch.
        counts: the number of steps of each scheduler at the start of the epoch.
    """

    complete = False

    def on_train_start(self) -> None:
        self.on_train_epoch_start()
        self.complete = False

    def on_train_epoch_start(self) -> None:
        self.complete = True
        self.steps, self.windows = self._run.progress.global_step, self._run.progress.stepped_batches
        self.counts = scheduler_counts(self._run)


class AutomaticWatch(_EpochWatch):
    """Checks a fit with automatic optimization."""

    _schedulers_told = False
    _without_steps = 0  # number of consecutive epochs without a step

    def before_validation(self) -> None:
        """At the first call, log the parameters that get no gradient. With several processes, log nothing, because a
        strategy may keep the gradients in other tensors.
        """
        run, is_first = self._run, self.first("parameters")
        optimizers = run.engine.strategy.optimizers
        several = run.window.gather is not None or len(optimizers) != 1
        if not is_first or several or run.progress.global_step == self.steps:
            return
        reached = {id(each) for each in parameters_of(optimizers[0]) if each.grad is not None}
        reached |= {id(each) for each in optimizers[0].state}
        # parameters on the meta device are on other ranks
        here = [each for each in parameters_of(optimizers[0]) if not each.is_meta]
        trained = {id(each) for each in here if each.requires_grad}
        unreached = trained - reached
        named = [name for name, each in run.module.named_parameters() if id(each) in unreached]
        if named and trained & reached:
            rank_zero_info(
                f"Parameters that an optimizer has and that no gradient has reached so far: {len(named)}, for example "
                f"{named[0]!r}. They are not trained. If this is not meant, look for a detach() or no_grad() between "
                "them and the loss."
            )

    batches_ended = before_validation

    def epoch_closed(self) -> None:
        if self.complete:
            self._check_steps()
            self._check_schedulers()

    def _check_steps(self) -> None:
        run = self._run
        losses = run.window.batches_with_gradients and run.progress.stepped_batches > self.windows
        # a request to stop has ended the epoch inside a window, before the window's optimizer step
        open_window = run.window.batches_done > 0
        if not losses or open_window or run.progress.global_step > self.steps:
            self._without_steps = 0
            return
        self._without_steps += 1
        if self._without_steps == (2 if run.engine.precision.scales_loss else 1) and self.first("steps"):
            # with a loss scale, one epoch without steps is normal, because a too large initial scale is reduced slowly
            rank_zero_warn(
                "This epoch had losses, and no optimizer step was made, so nothing was updated. An override of "
                "optimizer_step must call optimizer.step(closure=optimizer_closure); in 16-mixed, a step is left out "
                "where a gradient is not finite."
            )

    def _check_schedulers(self) -> None:
        if self._schedulers_told:
            return
        steps, configs = self._run.progress.global_step - self.steps, self._run.engine.strategy.lr_scheduler_configs
        for config, old, new in zip(configs, self.counts, scheduler_counts(self._run), strict=False):
            due = max(steps if config.interval == "step" else 1, 1)
            if isinstance(old, int) and isinstance(new, int) and new - old > due:
                self._schedulers_told = True
                rank_zero_warn(
                    f"{type(config.scheduler).__name__} has stepped {new - old} times in an epoch in which the Trainer "
                    f"steps it at most {due} times, because other code calls its step() too. Leave that call "
                    'out, or set "interval" and "frequency" in its dictionary.'
                )


class ManualWatch(_EpochWatch):
    """Checks a fit with manual optimization: hooks observe the first two steps of each optimizer."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._told = self._add_up = False
        self._idle: dict[int, Any] = {}  # index of an optimizer that has not stepped -> the handle of its hook
        self._spent: list[Any] = []  # handles of hooks that are no longer needed
        self._first: dict[int, Any] = {}  # index of an optimizer -> a gradient of its first step

    def on_train_start(self) -> None:
        super().on_train_start()
        self._steps_before, self._counts_before = self.steps, self.counts
        for index, optimizer in enumerate(self._run.engine.strategy.optimizers):
            self._idle[index] = optimizer.register_step_post_hook(self._stepped(index))

    def _stepped(self, index: int) -> Any:
        seen_twice = False

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            nonlocal seen_twice
            gradient = next(iter(gradients_of(optimizer)), None)
            if gradient is None or seen_twice:
                return
            handle = self._idle.pop(index, None)
            if handle is not None:  # the first step with gradients
                self._first[index] = gradient
                self._spent.append(handle)  # removed later, because torch is iterating over its hooks
            elif index in self._first:
                seen_twice = True
                if self._first.pop(index) is gradient and not self._run.engine.strategy.facts.is_distributed:
                    self._add_up = True

        return stepped

    def batches_ended(self) -> None:
        """Warn, or raise an error, if no optimizer has stepped since the fit began.

        Raises:
            ConfigurationError: no optimizer has stepped, and only ``max_steps`` can end the run.
        """
        run, progress, limits = self._run, self._run.progress, self._run.limits
        if self._told or not run.engine.strategy.optimizers or progress.global_step > self._steps_before:
            return
        if progress.batch_idx < 0 or progress.resumed_batches >= 0:
            return
        if run.window.batches_with_gradients and progress.earlier_batches == 0:
            return  # the module may accumulate over several epochs
        self._told = True
        message = (
            f"{type(run.module).__name__} optimizes by hand, and in this epoch it has stepped none of the optimizers "
            "that self.optimizers() returns, so global_step is the same as before. Call self.optimizers().step(), and "
            "not the step of another object."
        )
        if limits.max_steps != ENDLESS and limits.max_epochs == ENDLESS:
            raise ConfigurationError(f"{message} max_steps={limits.max_steps:.0f} would never be reached.")
        rank_zero_warn(message)

    def epoch_closed(self) -> None:
        run = self._run
        self._remove_spent()
        stepped = run.progress.global_step > self.steps and run.progress.epochs_done > 0
        if self.complete and self._idle and stepped and len(run.engine.strategy.optimizers) > 1:
            numbers = ", ".join(map(str, self._idle))
            self._forget()
            rank_zero_warn(
                f"Of the optimizers that configure_optimizers returned, number {numbers} has not changed a parameter "
                "in this epoch: its step() was not called, or its parameters had no gradient then. Call "
                "self.manual_backward(loss) before its step(), and zero_grad() after it or before the backward pass."
            )

    def on_train_end(self) -> None:
        progress, counts = self._run.progress, scheduler_counts(self._run)
        self._forget()
        self._first.clear()
        if self._add_up:
            rank_zero_warn(
                "The gradients of two optimizer steps in a row have added up: zero_grad() was not called between them. "
                "With manual optimization, call optimizer.zero_grad() before self.manual_backward(loss)."
            )
        # a scheduler of another library may have no integer count
        counted = bool(counts) and all(isinstance(each, int) for each in counts)
        if counted and counts == self._counts_before and progress.epochs_done > 0 and progress.global_step > 0:
            rank_zero_warn(
                "The learning-rate schedulers that configure_optimizers returned have never stepped. With manual "
                "optimization the Trainer does not step them: call self.lr_schedulers().step()."
            )

    def _forget(self) -> None:
        self._spent += self._idle.values()
        self._idle.clear()
        self._remove_spent()

    def _remove_spent(self) -> None:
        while self._spent:
            self._spent.pop().remove()


# ---- limits and schedules -------------------------------------------------------------------------------------------


class LimitsWatch(Watch):
    """Warns about limits and schedulers that do not match a fit's length, and explains why a fit trains nothing."""

    def nothing_trained(self) -> None:
        progress, limits = self._run.progress, self._run.limits
        counts = (
            (progress.current_epoch, limits.max_epochs, "epochs"),
            (progress.global_step, limits.max_steps, "steps"),
        )
        done = [f"{count} of {limit} {what}" for count, limit, what in counts if limit != ENDLESS]
        rank_zero_info(
            f"Nothing to train: {' and '.join(done) or f'{progress.global_step} steps'} are done."
            + (" limit_train_batches is 0." if limits.train_batches == 0 else "")
            + (" A request to stop is in force." if progress.should_stop else "")
            + (" To train on, raise these limits; to train from the beginning, make a new Trainer." if done else "")
        )

    def on_train_start(self) -> None:
        run, limits = self._run, self._run.limits
        epochs, batches = limits.max_epochs, run.progress.num_training_batches
        starts = run.progress.epochs_done == 0
        if starts and epochs != ENDLESS and run.validates() and (cause := self._never_validates()):
            rank_zero_warn(f"This fit never validates: {cause}. Write a smaller number.")
        if not run.module.automatic_optimization:
            return
        if epochs != ENDLESS and batches != ENDLESS:
            steps = min(epochs * math.ceil(batches / limits.accumulate), limits.max_steps)
            for config in run.engine.strategy.lr_scheduler_configs:
                _warn_of_schedule(config, epochs, steps)
        if batches and batches < limits.accumulate and not run.settings.fast_dev_run:
            few = f"{number_of(int(batches), 'batch')}, fewer than accumulate_grad_batches={limits.accumulate}"
            rank_zero_info(f"An epoch has {few}: each epoch makes one optimizer step.")

    def _never_validates(self) -> str:
        """If the interval between validations is longer than the fit, return a text about it; otherwise ""."""
        limits, batches = self._run.limits, self._run.progress.num_training_batches
        epochs, every, interval = limits.max_epochs, limits.check_val_every_n_epoch, limits.val_check_interval
        if every is not None:
            too_rare = every > epochs
            return f"check_val_every_n_epoch={every} is more than max_epochs={epochs:.0f}" if too_rare else ""
        if not isinstance(interval, int) or interval <= epochs * batches:
            return ""
        return f"val_check_interval={interval} is more than the {epochs * batches:.0f} batches of {epochs:.0f} epochs"


def _warn_of_schedule(config: LRSchedulerConfig, epochs: float, steps: float) -> None:
    """Warn about a scheduler that never steps in this fit. Also warn about a scheduler that steps once per epoch,
    although its length seems to be given in optimizer steps.
    """
    name, interval = type(config.scheduler).__name__, config.interval
    length = "total_steps" if hasattr(config.scheduler, "total_steps") else "T_max"
    total, due = getattr(config.scheduler, length, None), epochs if interval == "epoch" else steps
    if due < config.frequency and epochs > 1:  # a fit of one epoch is often a trial
        rank_zero_warn(
            f'{name} never steps in this fit: "frequency": {config.frequency} is more than its {due:.0f} '
            f"{interval}s. Write a smaller number."
        )
    elif interval != "epoch" or not isinstance(total, int) or total <= 2 * epochs:
        return
    elif length == "total_steps" or total >= steps:
        rank_zero_warn(
            f"{name}({length}={total}) steps once an epoch, {epochs:.0f} times in this fit, and does not come to its "
            'end. Add "interval": "step" to its dictionary.'
        )


def scheduler_counts(run: Run) -> list[Any]:
    """Return the number of steps of each scheduler of ``run``, as torch counts them."""
    return [getattr(each.scheduler, "last_epoch", None) for each in run.engine.strategy.lr_scheduler_configs]
