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

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from drivetrain.base.introspect import takes_iterator
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import naming
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.data.feed import BatchIterator, Resumed, feed, fetches_ahead, gives_up, mark_after_end, set_epoch
from drivetrain.data.passes import is_replayed
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loops.evaluate import agree_on_counts, evaluate, sanity_check, validates_in, validation_due
from drivetrain.loops.loaders import check_counts
from drivetrain.loops.pieces import Step
from drivetrain.loops.progress import RunningStage
from drivetrain.loops.restart import (
    states_now,
    take_up_between_passes,
    take_up_random_state,
    take_up_results,
    take_up_state,
    take_up_window,
    validation_start,
    warn_if_inexact,
    watch_exceptions,
)
from drivetrain.loops.restart_checks import check_position
from drivetrain.loops.run import ENDLESS, Run, val_check_every
from drivetrain.loops.schedules import Schedules
from drivetrain.loops.step import make_step
from drivetrain.module.hooks import Call
from drivetrain.module.losses import outputs_for_hooks
from drivetrain.module.optimizers import LRSchedulerConfig


class _Bound(NamedTuple):
    """Everything a step needs, so that in the loop nothing is looked up by name."""

    step: Step
    schedules: Schedules
    step_schedulers: Sequence[LRSchedulerConfig]
    batch_start: tuple[Call, ...]
    module_batch_start: Callable[..., Any] | None
    batch_end: tuple[Call, ...]
    accumulate: int
    windowed: float  # where an epoch cuts its last window short; inf: a short one is divided as a full one
    log_every: int
    validates: bool
    validate_every: float
    looks_after: bool
    together: Any  # a Together, or None
    uneven_from: float  # the first batch that may count for less than those of other ranks; inf: none does
    keep_start: Callable[[], None] | None


def _bind(run: Run) -> _Bound:
    """Bind the run as it is now: when an epoch begins, and when somebody has changed a part of it (spec 3.10)."""
    hooks, limits, module = run.hooks, run.limits, run.module
    run.stale = False
    run.swap_optimizers()
    configs = run.engine.strategy.lr_scheduler_configs if module.automatic_optimization else []  # trap T16
    schedules = Schedules(configs, hooks, run.book)
    validates = validates_in(run, run.progress.current_epoch)
    return _Bound(
        step=make_step(run),
        schedules=schedules,
        step_schedulers=schedules.step,
        batch_start=hooks.bind_callbacks("on_train_batch_start"),
        module_batch_start=hooks.bind_batch_start(),
        batch_end=hooks.bind("on_train_batch_end"),
        accumulate=limits.accumulate,
        windowed=ENDLESS if run.window.undersized else run.progress.num_training_batches,
        log_every=limits.log_every_n_steps,
        validates=validates,
        validate_every=val_check_every(limits, run.progress.num_training_batches) if validates else ENDLESS,
        looks_after=validates or bool(schedules.step_plateau),
        together=run.together,
        uneven_from=ENDLESS if run.together is None else run.together.uneven_from,
        keep_start=watch_exceptions(run) if run.saves_on_exception else None,
    )


def fit(run: Run) -> None:
    """Train until ``max_epochs``, ``max_steps`` or a request to stop."""
    hooks, book, progress, limits = run.hooks, run.book, run.progress, run.limits
    _prepare(run)
    resumes = run.restart is not None and (progress.epoch_ending or progress.batches_done > 0)
    if run.training_done() and not resumes:
        _say_why_nothing_is_trained(run)
        take_up_random_state(run)
        return
    hooks.call("on_train_start")
    run.validated_at = time.monotonic()
    transfer = run.transfer[1]
    training_scope = hooks.scope("training_step")
    if progress.epoch_ending:
        _take_up_epoch_end(run)

    while run.restart is not None or not run.training_done():
        source, bound = _begin_epoch(run)
        book.scope = training_scope
        held, divisor = progress.held, progress.divisor
        accumulate = divisor if held else bound.accumulate
        for batch, is_last in source:
            if run.stale:
                bound = _bind(run)
            progress.batch_idx = batch_idx = progress.batch_idx + 1
            progress.is_last_batch = is_last
            if held == 0:
                accumulate = bound.accumulate
                divisor = 1 if accumulate == 1 else int(min(accumulate, bound.windowed - batch_idx))
            held += 1
            window_ends = held >= accumulate or is_last
            log_every = bound.log_every
            book.copies = flushes = window_ends and log_every > 0 and (progress.stepped_batches + 1) % log_every == 0
            if uneven := batch_idx >= bound.uneven_from:
                bound.together.begin(batch_idx)
            if transfer is not None:
                batch = transfer(batch, 0)
            book.batch, book.size = batch, None
            for hook in bound.batch_start:
                hook(batch, batch_idx)
            if bound.module_batch_start is not None and bound.module_batch_start(batch, batch_idx) == -1:
                if uneven:
                    bound.together.end()
                break
            steps_before = progress.global_step
            output = bound.step(batch, batch_idx, held, window_ends, divisor)
            if run.batches is not None:  # the step may have taken further batches
                batch_idx, is_last = progress.batch_idx, progress.is_last_batch
            progress.stepped = stepped = progress.global_step != steps_before
            if bound.step_schedulers and stepped:
                bound.schedules.advance_step(bound.step_schedulers, progress)
            if is_last and bound.schedules.epoch:
                bound.schedules.advance(bound.schedules.epoch, progress.current_epoch + 1)
            progress.batches_done = batch_idx + 1
            if window_ends:
                held = 0
                progress.stepped_batches += 1
            if accumulate != 1:
                progress.held, progress.divisor = held, divisor
            if flushes:
                progress.flush_due = True
            for hook in bound.batch_end:
                hook(outputs_for_hooks(output), batch, batch_idx)

            if is_last:
                next(source, None)  # the loader is asked for its end before validation, as in a plain loop
            if uneven:
                bound.together.end()
            if flushes or bound.looks_after:
                _after_batch(run, bound)
                book.scope = training_scope
            if progress.global_step >= limits.max_steps or (progress.should_stop and not is_last and run.may_stop()):
                break
            if held == 0 and bound.keep_start is not None:
                bound.keep_start()
        _end_epoch(run, bound.schedules)
    _warn_of_the_unlogged(run)
    hooks.call("on_train_end")


def _after_batch(run: Run, bound: _Bound) -> None:
    """What follows a batch that is done: flush the log, validate, step the schedulers that watch a value.

    An exception may come anywhere in it: ``progress`` says at each moment which of it is done.
    """
    progress = run.progress
    if progress.flush_due:
        rows = run.book.agree_on_steps(run.book.step_values("train"))
        try:
            run.publish(rows, progress.logger_step)
        except BaseException:
            for row in rows:
                row.entry.fresh = True  # not logged: a checkpoint that is saved now must hold them
            raise
        run.agree_to_stop()
        progress.flush_due = False
    validated = (
        bound.validates
        and progress.validation != "done"
        and (progress.validation == "running" or validation_due(run, bound.validate_every, progress.is_last_batch))
    )
    if validated:
        _validate(run)
    if progress.held == 0 and progress.stepped and bound.schedules.step_plateau:
        bound.schedules.advance_step(bound.schedules.step_plateau, progress)
    progress.validation = ""
    if validated and progress.held > 0 and bound.keep_start is not None:
        bound.keep_start()  # inside a window: a run that goes on at its start would validate again


def _iterator_for_step(run: Run, source: Iterator[tuple[Any, bool]]) -> BatchIterator | None:
    """The iterator for a ``training_step`` that fetches its batches itself; ``None`` for one that is given them."""
    if not takes_iterator(run.module.training_step):
        return None
    if run.limits.accumulate > 1:
        raise ConfigurationError(
            f"{type(run.module).__name__}.training_step takes dataloader_iter, so nobody knows how many of its batches "
            f"accumulate_grad_batches={run.limits.accumulate} would be. Accumulate inside the step, and write 1."
        )
    progress = run.progress

    def advance(is_last: bool) -> int:
        progress.batch_idx += 1
        progress.is_last_batch = is_last
        return progress.batch_idx

    return BatchIterator(source, advance, run.transfer[1])


def _warn_of_the_unlogged(run: Run) -> None:
    steps, every = run.progress.stepped_batches, run.limits.log_every_n_steps
    if run.unlogged and steps < every:
        rank_zero_warn(
            f"{', '.join(sorted(run.unlogged))}: logged in training steps, but after {steps} steps no logger has seen "
            f"it, because log_every_n_steps={every}. Write a smaller log_every_n_steps."
        )


def _say_why_nothing_is_trained(run: Run) -> None:
    progress, limits = run.progress, run.limits
    message = (
        f"Nothing to train: {progress.current_epoch} of {limits.max_epochs} epochs and {progress.global_step} of "
        f"{limits.max_steps} steps are done, and an epoch has {progress.num_training_batches} batches."
    )
    asked_for = 0 in (limits.max_epochs, limits.max_steps, limits.train_batches)
    (rank_zero_warn if progress.num_training_batches == 0 and not asked_for else rank_zero_info)(message)


def _prepare(run: Run) -> None:
    """The sanity check; make the training loader and check the arguments that depend on its length."""
    progress, limits = run.progress, run.limits
    if run.saves_on_exception:
        run.hooks.completes = frozenset({"on_train_batch_end", "on_validation_end", "on_train_epoch_end"})
    if run.restart is not None:
        run.loaders.take_up(run.restart.get("loaders", {}))
        if (states := run.restart.get("val_loaders")) and run.validates():
            with naming(run.resumed_from):
                run.loaders.restore_evaluation("validate", states)
    sanity_check(run)
    take_up_results(run)
    progress.stage = RunningStage.TRAINING
    run.book.group, run.book.epoch_done = "train", False
    if limits.max_epochs == 0 or limits.max_steps == 0:
        return  # nothing but set-up and teardown (trap T49)
    progress.num_training_batches = run.loaders.count_training()
    if limits.val_batches != 0 and run.loaders.defined("validate"):
        agree_on_counts(run, "validate", run.loaders.evaluation("validate"))
    if run.validates():
        val_check_every(limits, progress.num_training_batches)


def _begin_epoch(run: Run) -> tuple[Iterator[tuple[Any, bool]], _Bound]:
    """Bring everything to the start of an epoch, or to where one is taken up; return its batches and its step."""
    progress, book, loaders = run.progress, run.book, run.loaders
    resumes = run.restart is not None and progress.batches_done > 0
    progress.between_epochs = False
    book.leave_batch()
    book.group, book.epoch_done = "train", False
    if not resumes:
        progress.batch_idx, progress.batches_done, progress.is_last_batch, progress.epoch_cut = -1, 0, False, False
        progress.held, progress.divisor = 0, 1
        loaders.reload("fit", run.limits.reload_every)
    loader = loaders.training()
    progress.num_training_batches = loaders.count_training()  # the limit may have been changed
    set_epoch(loader, progress.current_epoch)
    if resumes:
        return _take_up_epoch(run, loader)
    passes = loaders.passes()
    passes.start_epoch()
    run.window_start = None
    run.at_epoch_start = states_now(run)
    run.hooks.call("on_train_epoch_start")
    warn_if_inexact(run)
    take_up_window(run)
    take_up_between_passes(run)
    take_up_random_state(run)
    run.restart = None
    source = _feed(run, loader)
    bound = _bind_with(run, source)
    if bound.keep_start is not None:
        bound.keep_start()
    return source, bound


def _feed(run: Run, loader: Any, resumed: Resumed | None = None) -> Iterator[tuple[Any, bool]]:
    move, transfer = run.transfer
    passes, num_batches = run.loaders.passes(), run.loaders.count_own_training()
    source = feed(passes, num_batches, None if transfer else move, fetches_ahead(loader), resumed)
    if run.window.gather is None:
        return source
    from drivetrain.loops.together import Together  # here, so that importing the Trainer stays quick

    together = run.together = Together(run, loader)
    done = 0 if resumed is None else resumed.done
    asked = run.engine.strategy.data.gather_objects((num_batches, done < num_batches or passes.can_repeat))
    counts = [count for count, _ in asked]
    check_counts(counts, "training")
    longest = run.progress.num_training_batches = max(counts)  # a limit may be another on this rank alone
    if resumed is not None and longest == ENDLESS:
        raise CheckpointError(
            "The checkpoint was saved in the middle of an epoch, by one of several processes whose loader has no "
            "length, so they had fetched ahead. Resume from one that was saved at the end of an epoch."
        )
    if done < longest and not all(can_resume for _, can_resume in asked):
        raise CheckpointError(
            f"The checkpoint was saved after {done} batches of an epoch, when some ranks repeated their last batch: "
            f"the ranks' loaders have {', '.join(f'{count:g}' for count in counts)} batches. This kind of loader "
            "cannot give a batch again. Resume from a checkpoint that was saved at the end of an epoch."
        )
    if len(set(counts)) > 1 and takes_iterator(run.module.training_step):
        raise ConfigurationError(
            f"{type(run.module).__name__}.training_step takes dataloader_iter, and the loaders of the ranks have "
            f"different lengths, {counts} batches. Give all ranks as many, or let training_step take the batch."
        )
    return together.over(source, counts, done)


def _bind_with(run: Run, source: Iterator[tuple[Any, bool]]) -> _Bound:
    run.batches = _iterator_for_step(run, source)
    return _bind(run)


def _take_up_epoch(run: Run, loader: Any) -> tuple[Iterator[tuple[Any, bool]], _Bound]:
    """Go on in the middle of an epoch: finish the batch that was done last, then its rest."""
    progress, state, passes = run.progress, run.restart, run.loaders.passes()
    assert state is not None  # the caller has looked
    take_up_state(run)
    data, done = state.get("data"), progress.batches_done
    with naming(run.resumed_from):
        _check_batches_done(run, data)
        if data is not None:
            check_position(data, passes)
    if is_replayed(loader) and not progress.is_last_batch:
        rank_zero_info(
            f"The loader {type(loader).__name__} does not know where it is: its first {done} batches are fetched again "
            "and left out."
        )
    after: dict[str, Any] = {}  # the random state when the next batch is asked for
    source = _feed(run, loader, Resumed(done, caught_up=lambda: set_rng_state(after)))
    bound = _bind_with(run, source)
    if run.book.scope is None:
        run.book.scope = run.hooks.scope("training_step")
    own = run.loaders.count_own_training()
    if progress.is_last_batch and data is not None and done <= own and not gives_up(loader, own):
        with naming(run.resumed_from):
            passes.resume(data)
        take_up_random_state(run)
        next(source, None)  # asks the loader for its end, unless the checkpoint was saved after that
        state["data"] = mark_after_end(passes, data)  # for what is saved in the validation that follows
    else:
        if progress.is_last_batch:
            take_up_between_passes(run)
        take_up_random_state(run)
    if progress.validation == "running":
        run.before_validation = validation_start(run)
    if not state.get("settled"):
        _after_batch(run, bound)  # the earlier run may have ended before it logged the batch's values
    if progress.is_last_batch:
        run.restart = None
        return iter(()), bound
    left = progress.global_step >= run.limits.max_steps or (progress.should_stop and run.may_stop())
    if left or data is None:
        take_up_between_passes(run)
        run.restart = None
        return iter(()), bound
    if bound.keep_start is not None:
        bound.keep_start()  # now: once the loader has fetched ahead, its position is another
    after.update(rng_state())
    with naming(run.resumed_from):
        if done >= run.loaders.count_own_training():  # other ranks have more batches, and this one repeats its last
            move, transfer = run.transfer
            batch = passes.last_batch(data)
            run.together.repeat(batch if transfer is not None else move(batch))
            passes.resume(data)
            set_rng_state(after)
            next(iter(passes), None)  # asks the loader for its end, unless the checkpoint was saved after that
            run.restart = None
            return source, bound
        passes.resume(data)
    set_rng_state(data.get("rng", after))  # a batch that is fetched ahead was drawn before the checkpoint
    run.restart = None
    return source, bound


def _check_batches_done(run: Run, data: dict[str, Any] | None) -> None:
    """Whether the rest of the epoch can be known.

    Raises:
        CheckpointError: the checkpoint does not say which batches were done, or the epoch has fewer now.
    """
    progress = run.progress
    done = progress.batches_done
    if data is None and not progress.is_last_batch:
        raise CheckpointError(
            f"The checkpoint was saved after {done} batches of epoch {progress.current_epoch}, and does not say which "
            "those were. Resume from one that was saved at the end of an epoch, or load only its weights."
        )
    if done >= progress.num_training_batches and not progress.is_last_batch:
        raise CheckpointError(
            f"The checkpoint was saved after {done} batches of an epoch, which now has only "
            f"{progress.num_training_batches:.0f}. Resume with limit_train_batches as it was."
        )


def _take_up_epoch_end(run: Run) -> None:
    """The checkpoint was saved when the epoch's batches were over: what was left of it is done now."""
    take_up_state(run)
    take_up_between_passes(run)
    take_up_random_state(run)
    run.restart = None
    configs = run.engine.strategy.lr_scheduler_configs if run.module.automatic_optimization else []
    run.book.epoch_done = run.book.copies = True
    _close_epoch(run, Schedules(configs, run.hooks, run.book))


def _end_epoch(run: Run, schedules: Schedules) -> None:
    progress, book = run.progress, run.book
    if progress.batch_idx == -1:
        raise ConfigurationError(
            f"The training loader {type(run.loaders.training()).__name__} gave no batch in epoch "
            f"{progress.current_epoch}. Pass something that can be iterated anew in each epoch, not a generator."
        )
    book.leave_batch()
    run.agree_to_stop()
    stopped = progress.global_step >= run.limits.max_steps or progress.should_stop
    cut = stopped and not progress.is_last_batch
    ended_at_last = progress.is_last_batch and progress.batches_done > progress.batch_idx
    if not (ended_at_last or cut):  # on_train_batch_start returned -1, or the loader's length was wrong
        schedules.advance(schedules.epoch, progress.current_epoch + 1)
    book.agree_on_epoch("train")  # callbacks look at it in the hook, and that may log more
    progress.epoch_cut, progress.cut_batches = cut, progress.batches_done  # together with the end of the epoch
    book.epoch_done = progress.epoch_ending = book.copies = True
    run.hooks.call("on_train_epoch_end")
    _close_epoch(run, schedules)


def _close_epoch(run: Run, schedules: Schedules) -> None:
    """What comes after the hooks of an epoch's end, those that save included.

    A run that resumes here logs the epoch's row, whether or not the earlier run still did: better twice than not at
    all. The schedulers come last, so that nothing that fails after them could let them step twice.
    """
    progress, book = run.progress, run.book
    book.agree_on_epoch("train")
    run.agree_to_stop()
    book.refresh()
    run.publish(book.epoch_values("train"), progress.logger_step)
    rest = book.step_values("train")
    book.read([row for row in rest if row.entry.to_bar])  # so that an epoch without a flush shows its numbers too
    if progress.stepped_batches < run.limits.log_every_n_steps:
        run.unlogged.update(row.name for row in rest if row.entry.to_logger and run.log is not None)
    if not progress.epoch_cut:  # its rest may still come, in a run that goes on from here
        schedules.advance(schedules.epoch_plateau, progress.current_epoch + 1)
    book.reset("train")
    progress.current_epoch += 1
    progress.earlier_batches += progress.batches_done
    progress.batches_done, progress.epoch_ending, progress.between_epochs = 0, False, True
    if run.limits.train_batches == 0:
        progress.num_training_batches = 0  # somebody has switched training off: there is no further epoch


def _validate(run: Run) -> None:
    progress = run.progress
    run.before_validation = validation_start(run)
    progress.validation = "running"
    if not run.holds_gradients:
        run.hooks.call_method("on_validation_model_zero_grad")
    run.book.refresh()  # so that what the training batch logged is there while validation runs
    run.loaders.reload("validate", run.limits.reload_every)
    loaders = run.loaders.evaluation("validate")
    run.loaders.count_evaluation("validate")
    evaluate(run, "validate", loaders)
    run.agree_to_stop()
    progress.stage = RunningStage.TRAINING
    run.book.group, run.book.epoch_done = "train", False
    run.validated_at = time.monotonic()
