"""What a fit shows only while it runs: an optimizer that never steps, layers that come late, a metric without end."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.tree import leaves
from drivetrain.loops.metrics import metrics_in
from drivetrain.loops.oversights import (
    modules_in_eval_mode,
    warn_of_eval_mode,
    warn_of_frozen_statistics,
    warn_of_swapped_loaders,
)
from drivetrain.loops.run import Run
from drivetrain.module.optimizers import parameters_of

_COMPARED = 65_536  # values of a batch


class FitWatch:
    """Looks at a fit at the ends of its epochs, and says once what has no effect; nothing of it runs in a step.

    Args:
        run: about to train.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = run.progress.global_step
        self._modes_told = bool(modules_in_eval_mode(run.module))  # which is said at the start of training
        self._left_out = len(_left_out(run))
        self._counts = self._scheduler_counts()
        self._first_counts = self._counts
        self._updates: dict[str, int] = {}
        self._begun_elsewhere = False  # this epoch, whose first batches another run has trained on
        self._told: set[str] = set()
        self._without_steps = 0  # epochs in a row
        self._idle: dict[int, Any] = {}  # optimizers that have not stepped, and the hooks that see when they do
        self._spent: list[Any] = []  # hooks that have seen it
        self._cleared: set[int] = set()  # optimizers of which two steps were seen
        self._kept: dict[int, Any] = {}  # by optimizer, a gradient of its first step
        self._rates = self._learning_rates()
        run.first_look = self._look
        self._check_loaders()
        if not run.module.automatic_optimization:
            for index, optimizer in enumerate(run.engine.strategy.optimizers):
                self._idle[index] = optimizer.register_step_post_hook(self._stepped(index))

    def _stepped(self, index: int) -> Any:
        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            gradient = next((each.grad for each in parameters_of(optimizer) if each.grad is not None), None)
            if gradient is None or index in self._cleared:
                return
            handle = self._idle.pop(index, None)
            if handle is not None:  # the first step with gradients
                self._kept[index] = gradient
                self._spent.append(handle)  # not removed here: torch goes through its hooks now
            elif index in self._kept:
                self._cleared.add(index)
                if self._kept.pop(index) is gradient and not self._run.engine.strategy.facts.is_distributed:
                    self._told.add("gradients")

        return stepped

    def _scheduler_counts(self) -> list[Any]:
        return [getattr(each.scheduler, "last_epoch", None) for each in self._run.engine.strategy.lr_scheduler_configs]

    def epoch_began(self) -> None:
        """The hooks of an epoch's start have run."""
        self._updates, self._counts = updates_of(self._run.module), self._scheduler_counts()
        self._steps, self._windows = self._run.progress.global_step, self._run.progress.stepped_batches
        self._begun_elsewhere = self._run.progress.batches_done > 0

    def batches_ended(self) -> None:
        """The batches of an epoch are done, and no hook of its end has run."""
        if not self._modes_told:
            self._modes_told = warn_of_eval_mode(self._run)
        if self._run.first_look is not None:
            self._run.first_look()
        if "norms" not in self._told:
            self._told.add("norms")
            warn_of_frozen_statistics(self._run.module)

    def _look(self) -> None:
        """Look at what the batches so far have left: the last batch, and its gradients."""
        self._run.first_look = None
        if self._run.window.gather is not None:
            self._compare_samples()
        else:
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Say which parameters the loss has not reached; of one process, because a strategy may keep gradients."""
        run = self._run
        optimizers = run.engine.strategy.optimizers
        if not run.module.automatic_optimization or len(optimizers) != 1 or run.progress.global_step == self._steps:
            return
        reached = {id(each) for each in parameters_of(optimizers[0]) if each.grad is not None}
        reached |= {id(each) for each in optimizers[0].state}
        here = [each for each in parameters_of(optimizers[0]) if not each.is_meta]  # the others are on other ranks
        trained = {id(each) for each in here if each.requires_grad}
        named = [name for name, each in run.module.named_parameters() if id(each) in trained - reached]
        if named and trained & reached:
            rank_zero_info(
                f"Parameters that an optimizer has and that no gradient has reached so far: {len(named)}, for example "
                f"{named[0]!r}. They are not trained. If this is not meant, look for a detach() or no_grad() between "
                "them and the loss."
            )

    def _compare_samples(self) -> None:
        """Warn if the ranks have trained on the same batch; all of them come here, once in a fit."""
        run = self._run
        digests = run.engine.strategy.data.gather_objects(_digest(run.book.batch))
        if None not in digests and len(set(digests)) == 1 and not run.uneven.draws:
            rank_zero_warn(
                "All ranks have trained on the same batch, from a loader that drivetrain does not divide, so each "
                "may train on all samples. Let each rank take its own: an IterableDataset by trainer.global_rank, a "
                "DistributedSampler by its rank. If this is meant, nothing is wrong."
            )

    def _check_loaders(self) -> None:
        """Compare the loaders, once those for validation are made: at the start or after the first validation."""
        if "loaders" not in self._told and self._run.validates() and self._run.loaders.is_known("validate"):
            self._told.add("loaders")
            warn_of_swapped_loaders(self._run)

    def _learning_rates(self) -> list[Any]:
        return [group.get("lr") for each in self._run.engine.strategy.optimizers for group in each.param_groups]

    def epoch_closed(self) -> None:
        """The epoch's hooks, its validation and its schedulers are done."""
        self._check_loaders()
        warn_of_unreset(self._run, self._updates)
        if len(missing := _left_out(self._run)) > self._left_out:
            self._left_out = len(missing)
            rank_zero_warn(
                f"Parameters that require a gradient have come since training began, {len(missing)} in all, and no "
                f"optimizer has them, so they are not trained: the first is {missing[0]!r}. Give them to one with "
                "optimizer.add_param_group({'params': ...}), or make layers in __init__ or configure_model."
            )
        while self._spent:
            self._spent.pop().remove()
        self._check_steps()
        self._check_schedulers()

    def _check_steps(self) -> None:
        run = self._run
        if self._begun_elsewhere:
            return
        several = len(run.engine.strategy.optimizers) > 1
        if self._idle and several and run.progress.global_step > self._steps and run.progress.epochs_done > 0:
            numbers = ", ".join(map(str, self._idle))
            self._forget()
            rank_zero_warn(
                f"Of the optimizers that configure_optimizers returned, number {numbers} has not changed a parameter "
                "in this epoch: its step() was not called, or its parameters had no gradient then. Call "
                "self.manual_backward(loss) before its step(), and zero_grad() after it or before the backward pass."
            )
        losses = run.window.batches_with_gradients and run.progress.stepped_batches > self._windows
        losses = losses and run.module.automatic_optimization
        open_window = run.window.batches_done > 0  # a request to stop came before its step
        if not losses or open_window or run.progress.global_step > self._steps:
            self._without_steps = 0
            return
        self._without_steps += 1
        if self._without_steps == (2 if run.engine.precision.scales_loss else 1) and "steps" not in self._told:
            self._told.add("steps")  # a scaler that begins too large may take an epoch
            rank_zero_warn(
                "This epoch had losses, and no optimizer step was made, so nothing was updated. An override of "
                "optimizer_step must call optimizer.step(closure=optimizer_closure); in 16-mixed, a step is left out "
                "where a gradient is not finite."
            )

    def _check_schedulers(self) -> None:
        run, before = self._run, self._counts
        self._counts, steps = self._scheduler_counts(), run.progress.global_step - self._steps
        if not run.module.automatic_optimization or "schedulers" in self._told:
            return
        configs = run.engine.strategy.lr_scheduler_configs
        for config, old, new in zip(configs, before, self._counts, strict=False):
            if not (isinstance(old, int) and isinstance(new, int)) or new < old:
                continue
            due = steps if config.interval == "step" else 1
            if new - old > max(due, 1):
                self._told.add("schedulers")
                rank_zero_warn(
                    f"{type(config.scheduler).__name__} has stepped {new - old} times in an epoch in which the Trainer "
                    f"steps it at most {max(due, 1)} times, because other code calls its step() too. Leave that call "
                    'out, or set "interval" and "frequency" in its dictionary.'
                )

    def ended(self) -> None:
        """The fit is over."""
        run = self._run
        self._forget()
        if "should_stop" in vars(run.module):
            rank_zero_warn("self.should_stop of a module has no effect. Write self.trainer.should_stop = True.")
        if "gradients" in self._told:
            rank_zero_warn(
                "The gradients of two optimizer steps in a row have added up: zero_grad() was not called between them. "
                "With manual optimization, call optimizer.zero_grad() before self.manual_backward(loss)."
            )
        wrapped = [getattr(each.step, "_wrapped_by_lr_sched", False) for each in run.engine.strategy.optimizers]
        returned = self._first_counts or run.engine.strategy.lr_scheduler_configs  # or a callback has set one later
        if any(wrapped) and not returned and self._rates == self._learning_rates():
            rank_zero_warn(
                "A learning-rate scheduler was built, and configure_optimizers has not returned it: the learning rate "
                "has not changed. Return [optimizer], [scheduler]. If you step it yourself, nothing is wrong."
            )
        counted = bool(self._counts) and all(isinstance(each, int) for each in self._counts)  # torch's schedulers do
        idle = counted and self._counts == self._first_counts and run.progress.epochs_done > 0
        if idle and not run.module.automatic_optimization and run.progress.global_step > 0:
            rank_zero_warn(
                "The learning-rate schedulers that configure_optimizers returned have never stepped. With manual "
                "optimization the Trainer does not step them: call self.lr_schedulers().step()."
            )

    def _forget(self) -> None:
        self._spent += self._idle.values()
        self._idle.clear()
        while self._spent:
            self._spent.pop().remove()


def _digest(batch: Any) -> int | None:
    """Return a checksum of the first tensor of ``batch`` with different values in it; ``None`` if it has none."""
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_complex():
            values = leaf.detach().flatten()[:_COMPARED].cpu().double()
            if values.numel() > 1 and bool((values != values[0]).any()):
                data = bytearray(values.nbytes)
                torch.frombuffer(data, dtype=torch.float64).copy_(values)  # without numpy, which is optional
                return zlib.crc32(data)
    return None


def _left_out(run: Run) -> list[str]:
    """Return the names of parameters that require a gradient and are in no optimizer."""
    stepped = {id(each) for optimizer in run.engine.strategy.optimizers for each in parameters_of(optimizer)}
    named = run.module.named_parameters() if stepped else ()
    return [name for name, each in named if each.requires_grad and id(each) not in stepped]


def updates_of(module: nn.Module) -> dict[str, int]:
    """Return how often each metric object of torchmetrics in ``module`` was updated since its last reset."""
    return {path: getattr(metric, "_update_count", 0) for path, metric in _metrics_in(module).items()}


def _metrics_in(module: nn.Module) -> dict[str, nn.Module]:
    return metrics_in(module) if "torchmetrics" in sys.modules else {}


def warn_of_unreset(run: Run, before: dict[str, int]) -> None:
    """Warn, once in a run, of a metric object whose value was computed of this pass over the data and an earlier one.

    Args:
        run: after a pass whose logged metric objects were reset.
        before: what :func:`updates_of` returned when the pass began.
    """
    if not any(before.values()) or "metrics" in run.told:
        return
    for path, metric in _metrics_in(run.module).items():
        went_on = 0 < before.get(path, 0) < getattr(metric, "_update_count", 0)
        if went_on and getattr(metric, "_computed", None) is not None:  # else only values of batches were used
            run.told.add("metrics")
            rank_zero_warn(
                f"The metric {path!r} has gone on from the last pass over the data, so its value is that of both. Log "
                f"the object itself, self.log(name, self.{path}), which resets it at the end of each pass, or call its "
                "reset(). Training and validation need an object each. If it is to add up all passes, nothing is wrong."
            )
            return
