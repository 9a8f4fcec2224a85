"""Warnings about optimizers and schedulers that never step, or step too often."""

from __future__ import annotations

from typing import Any

from drivetrain.advice.schedules import scheduler_counts
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.errors import ConfigurationError
from drivetrain.loops.run import ENDLESS, Run
from drivetrain.module.optimizers import parameters_of


class _EpochWatch:
    """The counters at the start of an epoch.

    Attributes:
        run: the fit.
        complete: whether this run trains the epoch from its first batch; otherwise it resumes in the epoch's middle or
            at its end.
        steps, windows: ``global_step`` and the finished windows at the start of the epoch.
        counts: how often each scheduler had stepped at the start of the epoch.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.complete = False

    def on_train_start(self) -> None:
        self.on_train_epoch_start()
        self.complete = False

    def on_train_epoch_start(self) -> None:
        self.complete = True
        self.steps, self.windows = self.run.progress.global_step, self.run.progress.stepped_batches
        self.counts = scheduler_counts(self.run)


class AutomaticWatch(_EpochWatch):
    """Checks a fit with automatic optimization."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._looked = self._steps_told = self._schedulers_told = False
        self._without_steps = 0  # number of epochs in a row without a step

    def before_validation(self) -> None:
        """Report once which parameters the loss does not reach; only with one process, because a strategy may keep
        gradients elsewhere.
        """
        run, looked = self.run, self._looked
        self._looked = True
        optimizers = run.engine.strategy.optimizers
        if looked or run.window.gather is not None or len(optimizers) != 1 or run.progress.global_step == self.steps:
            return
        reached = {id(each) for each in parameters_of(optimizers[0]) if each.grad is not None}
        reached |= {id(each) for each in optimizers[0].state}
        # the other parameters are on other ranks
        here = [each for each in parameters_of(optimizers[0]) if not each.is_meta]
        trained = {id(each) for each in here if each.requires_grad}
        named = [name for name, each in run.module.named_parameters() if id(each) in trained - reached]
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
        run = self.run
        losses = run.window.batches_with_gradients and run.progress.stepped_batches > self.windows
        open_window = run.window.batches_done > 0  # the request to stop came before the step of the open window
        if not losses or open_window or run.progress.global_step > self.steps:
            self._without_steps = 0
            return
        self._without_steps += 1
        if self._without_steps == (2 if run.engine.precision.scales_loss else 1) and not self._steps_told:
            # an epoch without steps is normal: a loss scale that starts too large may need an epoch
            self._steps_told = True
            rank_zero_warn(
                "This epoch had losses, and no optimizer step was made, so nothing was updated. An override of "
                "optimizer_step must call optimizer.step(closure=optimizer_closure); in 16-mixed, a step is left out "
                "where a gradient is not finite."
            )

    def _check_schedulers(self) -> None:
        if self._schedulers_told:
            return
        steps, configs = self.run.progress.global_step - self.steps, self.run.engine.strategy.lr_scheduler_configs
        for config, old, new in zip(configs, self.counts, scheduler_counts(self.run), strict=False):
            due = max(steps if config.interval == "step" else 1, 1)
            if isinstance(old, int) and isinstance(new, int) and new - old > due:
                self._schedulers_told = True
                rank_zero_warn(
                    f"{type(config.scheduler).__name__} has stepped {new - old} times in an epoch in which the Trainer "
                    f"steps it at most {due} times, because other code calls its step() too. Leave that call "
                    'out, or set "interval" and "frequency" in its dictionary.'
                )


class ManualWatch(_EpochWatch):
    """Checks a fit with manual optimization; hooks on its optimizers observe their first two steps."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._told = self._add_up = False
        self._idle: dict[int, Any] = {}  # optimizers that have not stepped, and the hooks that observe their steps
        self._spent: list[Any] = []  # hooks that are no longer needed
        self._first: dict[int, Any] = {}  # optimizer -> a gradient of its first step, until its second step

    def on_train_start(self) -> None:
        super().on_train_start()
        self._steps_before, self._counts_before = self.steps, self.counts
        for index, optimizer in enumerate(self.run.engine.strategy.optimizers):
            self._idle[index] = optimizer.register_step_post_hook(self._stepped(index))

    def _stepped(self, index: int) -> Any:
        seen_twice = False

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            nonlocal seen_twice
            gradient = next((each.grad for each in parameters_of(optimizer) if each.grad is not None), None)
            if gradient is None or seen_twice:
                return
            handle = self._idle.pop(index, None)
            if handle is not None:  # the first step with gradients
                self._first[index] = gradient
                self._spent.append(handle)  # not removed in the hook, because torch is iterating over its hooks
            elif index in self._first:
                seen_twice = True
                if self._first.pop(index) is gradient and not self.run.engine.strategy.facts.is_distributed:
                    self._add_up = True

        return stepped

    def batches_ended(self) -> None:
        """Check whether any optimizer has stepped since the fit began.

        Raises:
            ConfigurationError: no optimizer has stepped, and only ``max_steps`` would end the run.
        """
        run, progress, limits = self.run, self.run.progress, self.run.limits
        if self._told or not run.engine.strategy.optimizers or progress.global_step > self._steps_before:
            return
        if progress.batch_idx < 0 or progress.resumed_batches >= 0:
            return
        if run.window.batches_with_gradients and progress.earlier_batches == 0:
            return  # the module may accumulate over more than one epoch
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
        run = self.run
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
        progress, counts = self.run.progress, scheduler_counts(self.run)
        self._forget()
        self._first.clear()
        if self._add_up:
            rank_zero_warn(
                "The gradients of two optimizer steps in a row have added up: zero_grad() was not called between them. "
                "With manual optimization, call optimizer.zero_grad() before self.manual_backward(loss)."
            )
        # torch's schedulers have integer counts
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
