"""The training loop.

::

    sanity check; on_train_start
    while not done:                          one epoch
        on_train_epoch_start
        for batch in feed:                   hop 1: fetched, on the device
            on_train_batch_start             hop 2
            step                             hops 3 to 5: training_step, backward, optimizer
            schedulers; on_train_batch_end
            flush the log; validate          hop 6
        on_train_epoch_end
    on_train_end
"""

from __future__ import annotations

from typing import Any

from drivetrain.data.feed import count_batches, feed, fetches_ahead, set_epoch
from drivetrain.errors import ConfigurationError
from drivetrain.loops.evaluate import evaluate, sanity_check, validates_in, validation_due
from drivetrain.loops.progress import RunningStage
from drivetrain.loops.run import ENDLESS, Run, val_check_every
from drivetrain.loops.schedules import Schedules
from drivetrain.loops.step import make_step, outputs_for_hooks
from drivetrain.rank_zero import rank_zero_info, rank_zero_warn


def fit(run: Run) -> None:
    """Train until ``max_epochs``, ``max_steps`` or a request to stop."""
    hooks, book, progress, limits = run.hooks, run.book, run.progress, run.limits
    sanity_check(run)
    progress.stage = RunningStage.TRAINING
    book.group, book.epoch_done = "train", False
    loader, ahead, validate_every = _prepare(run)
    if run.training_done():
        _say_why_nothing_is_trained(run)
        return
    hooks.call("on_train_start")

    # Everything a step needs is bound here; in the loop nothing is looked up by name.
    strategy = run.engine.strategy
    step = make_step(run, strategy.optimizers[0] if strategy.optimizers else None)
    schedules = Schedules(strategy.lr_scheduler_configs, hooks, book)
    step_schedulers = schedules.step
    move, transfer = run.transfer
    batch_start = hooks.bind_callbacks("on_train_batch_start")
    module_batch_start = hooks.bind_method("on_train_batch_start")
    batch_end = hooks.bind("on_train_batch_end")
    training_scope = hooks.scope("training_step")
    accumulate, max_steps, log_every = limits.accumulate, limits.max_steps, limits.log_every_n_steps
    num_batches = progress.num_training_batches

    while not run.training_done():
        _begin_epoch(run, loader)
        validates = validates_in(run, progress.current_epoch)
        book.scope = training_scope
        held, divisor = 0, 1  # batches in the current window, and how many it will have
        for batch, is_last in feed(loader, num_batches, None if transfer else move, ahead):
            progress.batch_idx = batch_idx = progress.batch_idx + 1
            progress.is_last_batch = is_last
            if held == 0 and accumulate > 1:
                divisor = int(min(accumulate, num_batches - batch_idx))
            held += 1
            window_ends = held == accumulate or is_last
            book.copies = flushes = window_ends and log_every > 0 and (progress.stepped_batches + 1) % log_every == 0
            if transfer is not None:
                batch = transfer(batch, 0)
            book.batch, book.size = batch, None
            for hook in batch_start:
                hook(batch, batch_idx)
            if module_batch_start is not None and module_batch_start(batch, batch_idx) == -1:
                break

            steps_before = progress.global_step
            output = step(batch, batch_idx, held, window_ends, divisor)
            stepped = progress.global_step != steps_before
            if step_schedulers and stepped:
                schedules.advance(step_schedulers, progress.global_step)
            if is_last and schedules.epoch:
                schedules.advance(schedules.epoch, progress.current_epoch + 1)
            progress.batches_done = batch_idx + 1
            if window_ends:
                progress.stepped_batches += 1
            for hook in batch_end:
                hook(outputs_for_hooks(output), batch, batch_idx)

            if flushes:
                run.publish(book.step_values("train"), progress.logger_step)
            if validates and validation_due(run, validate_every, is_last):
                _validate(run, accumulating=not window_ends)
                book.scope = training_scope
            if window_ends:
                held = 0
                if stepped and schedules.step_plateau:
                    schedules.advance(schedules.step_plateau, progress.global_step)
            if progress.global_step >= max_steps or (progress.should_stop and not is_last and run.may_stop()):
                break
        _end_epoch(run, schedules)
    if run.unlogged and progress.stepped_batches < log_every:
        rank_zero_warn(
            f"{', '.join(sorted(run.unlogged))}: logged in training steps, but after {progress.stepped_batches} steps "
            f"no logger has seen it, because log_every_n_steps={log_every}. Write a smaller log_every_n_steps."
        )
    hooks.call("on_train_end")


def _say_why_nothing_is_trained(run: Run) -> None:
    progress, limits = run.progress, run.limits
    message = (
        f"Nothing to train: {progress.current_epoch} of {limits.max_epochs} epochs and {progress.global_step} of "
        f"{limits.max_steps} steps are done, and an epoch has {progress.num_training_batches} batches."
    )
    asked_for = 0 in (limits.max_epochs, limits.max_steps, limits.train_batches)
    (rank_zero_warn if progress.num_training_batches == 0 and not asked_for else rank_zero_info)(message)


def _prepare(run: Run) -> tuple[Any, bool, float]:
    """The training loader, whether it is fetched ahead, and after how many batches validation is due."""
    progress, limits = run.progress, run.limits
    if limits.max_epochs == 0 or limits.max_steps == 0:
        return None, False, ENDLESS  # nothing but set-up and teardown (trap T49)
    loader = run.loaders.training()
    progress.num_training_batches = count_batches(loader, limits.train_batches, "limit_train_batches")
    validate_every = ENDLESS
    if run.validates():
        validate_every = val_check_every(limits, progress.num_training_batches)
    return loader, fetches_ahead(loader), validate_every


def _begin_epoch(run: Run, loader: Any) -> None:
    progress, book = run.progress, run.book
    progress.batch_idx, progress.batches_done, progress.is_last_batch, progress.epoch_cut = -1, 0, False, False
    book.leave_batch()
    book.group, book.epoch_done = "train", False
    set_epoch(loader, progress.current_epoch)
    run.hooks.call("on_train_epoch_start")


def _end_epoch(run: Run, schedules: Schedules) -> None:
    progress, book = run.progress, run.book
    if progress.batch_idx == -1:
        raise ConfigurationError(
            f"The training loader {type(run.loaders.training()).__name__} gave no batch in epoch "
            f"{progress.current_epoch}. Pass something that can be iterated anew in each epoch, not a generator."
        )
    book.leave_batch()
    progress.epoch_cut = not progress.is_last_batch
    book.epoch_done = progress.epoch_ending = book.copies = True
    run.hooks.call("on_train_epoch_end")
    book.refresh()
    schedules.advance(schedules.epoch_plateau, progress.current_epoch + 1)
    run.publish(book.epoch_values("train"), progress.logger_step)
    rest = book.step_values("train")
    book.read([row for row in rest if row.entry.to_bar])  # so that an epoch without a flush shows its numbers too
    if progress.stepped_batches < run.limits.log_every_n_steps:
        run.unlogged.update(row.name for row in rest if row.entry.to_logger and run.log is not None)
    book.reset("train")
    progress.current_epoch += 1
    progress.earlier_batches += progress.batches_done
    progress.batches_done, progress.epoch_ending = 0, False


def _validate(run: Run, accumulating: bool) -> None:
    if not accumulating:
        run.hooks.call_method("on_validation_model_zero_grad")
    run.book.refresh()  # so that what the training batch logged is there while validation runs
    evaluate(run, "validate", run.loaders.evaluation("validate"))
    run.progress.stage = RunningStage.TRAINING
    run.book.group, run.book.epoch_done = "train", False
