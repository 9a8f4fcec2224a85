"""Run the batches of one training epoch: train on each batch, log its values, and validate when a validation is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from torch import Tensor

from drivetrain.base.introspect import takes_iterator
from drivetrain.base.seed import isolate_rng
from drivetrain.base.torch_private import kept_iterator
from drivetrain.data.feed import BatchIterator, Resumed, feed, fetches_ahead
from drivetrain.data.kept import generators_kept, parts_of, workers_kept
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loops.evaluate import evaluate, only_stops, validates_in, validation_due
from drivetrain.loops.graphs import bind_graphs
from drivetrain.loops.loaders import check_counts, check_orders, order_shared
from drivetrain.loops.progress import Phase
from drivetrain.loops.restart import validation_start, watch_exceptions
from drivetrain.loops.run import ENDLESS, Run, val_check_every
from drivetrain.loops.schedules import Schedules
from drivetrain.loops.step import make_step
from drivetrain.loops.uneven import UnevenInputs
from drivetrain.module.losses import outputs_for_hooks

Batches = Iterator[tuple[Any, bool]]
"""Pairs ``(batch, is_last)``. ``is_last`` is true for the last batch of the epoch."""

# The loop uses integers, because in Python 3.10 and 3.11 each access to an enumeration's member is a function call.
_FETCH, _BATCH_START, _FORWARD = int(Phase.FETCH), int(Phase.BATCH_START), int(Phase.FORWARD)
_BATCH_END = int(Phase.BATCH_END)


class Bound:
    """The functions and settings with which :func:`run_batches` trains on a batch, looked up once.

    The loop creates an object at the start of each epoch. It creates another before the next batch if ``run.stale`` is
    true, which means that code has changed a limit, a callback, a logger or an optimizer.

    Attributes:
        finish_window: called after the step of the last batch of a window (the batches of one optimizer step); or
            ``None``.
        windowed: the number of batches in the epoch, which limits the size of the last window. ``inf``: no limit, so
            the gradients of a shorter last window are divided by the size of a full window.
        has_follow_up: whether a validation, or the step of a scheduler that monitors a value, may follow a batch.
        has_start: whether the loop has work between the fetch of a batch and the batch's step: a hook, a transfer, or
            uneven inputs (ranks with different numbers of batches).
        accumulates: whether a window may have several batches.
        flushed_window: the index of the next window after which the log is flushed; -1: the log is never flushed.
        uneven: an :class:`UnevenInputs`, or ``None``. uneven_from: the index of the first batch in which this rank may
            have fewer samples than another rank; ``inf``: no batch.
        without_step: callables that receive the step's output after a window without an optimizer step.
    """

    def __init__(self, run: Run) -> None:
        hooks, limits = run.hooks, run.limits
        run.stale = False
        run.swap_optimizers()
        step = make_step(run)
        for wrap in hooks.bind_observers("step_bound"):
            step = wrap(step)
        self.schedules = Schedules(run)
        if run.settings.cuda_graphs:
            step = bind_graphs(run, step)
        self.step, self.finish_window = step
        self.batch_start = hooks.bind_callbacks("on_train_batch_start")
        self.module_batch_start = hooks.bind_batch_start()
        self.batch_end = hooks.bind("on_train_batch_end")
        self.accumulate, window = limits.accumulate, run.window
        self.accumulates = limits.accumulate > 1 or window.batches_done > 0  # a run may resume inside a window
        if not self.accumulates:
            window.size = 1
        batches = run.progress.num_training_batches
        self.windowed = ENDLESS if run.window.keeps_divisor else batches
        self.log_every, windows = limits.log_every_n_steps, run.progress.stepped_batches
        self.flushed_window = windows + -(windows + 1) % self.log_every if self.log_every > 0 else -1
        self.validates = validates_in(run, run.progress.current_epoch)
        self.validate_every = val_check_every(limits, batches) if self.validates else ENDLESS
        self.has_follow_up = self.validates or bool(self.schedules.step_plateau)
        self.uneven = run.uneven
        self.uneven_from = ENDLESS if run.uneven is None else run.uneven.uneven_from
        self.has_start = bool(run.uneven or run.transfer[1] or self.batch_start or self.module_batch_start)
        self.keep_start = watch_exceptions(run) if run.kept.saves_on_exception else None
        self.without_step = hooks.bind_observers("window_without_step")


def run_batches(run: Run, batches: Batches, bound: Bound) -> None:
    """Train on ``batches`` until no batch is left, or until the run must end."""
    book, progress, limits, window = run.book, run.progress, run.limits, run.window
    slot, transfer, scope = progress.slot, run.transfer[1], run.hooks.scope("training_step")
    output, uneven, step_fetches = None, False, run.batches is not None
    book.enter(scope)
    slot[0] = _FETCH
    for batch, is_last in batches:
        if run.stale:
            bound = Bound(run)
        slot[0] = _BATCH_START
        slot[1] += 1
        progress.batch_idx = batch_idx = progress.batch_idx + 1
        progress.is_last_batch = is_last
        position, window_ends = 1, True
        if bound.accumulates:
            if window.batches_done == 0:
                window.size = 1 if bound.accumulate == 1 else int(min(bound.accumulate, bound.windowed - batch_idx))
            position = window.batches_done + 1
            window_ends = position >= window.size or is_last
        flushes = window_ends and progress.stepped_batches == bound.flushed_window
        book.batch, book.size, book.scope, book.copies = batch, None, scope, flushes
        if bound.has_start:
            if uneven := batch_idx >= bound.uneven_from:
                bound.uneven.begin(batch_idx)
            if transfer is not None:
                book.batch = batch = transfer(batch, 0)
                book.size = None
            for hook in bound.batch_start:
                hook(batch, batch_idx)
            if bound.module_batch_start is not None and bound.module_batch_start(batch, batch_idx) == -1:
                if uneven:
                    bound.uneven.end()
                break
        slot[2] = steps_before = progress.global_step
        slot[0] = _FORWARD
        output = bound.step(batch, batch_idx, position, window_ends, window.size)
        if window_ends and bound.finish_window is not None:
            bound.finish_window()
        if step_fetches:  # the step may have fetched further batches
            batch_idx, is_last = progress.batch_idx, progress.is_last_batch
        progress.stepped = stepped = progress.global_step != steps_before
        if stepped and bound.schedules.step:
            bound.schedules.advance_step(bound.schedules.step)
        if is_last and bound.schedules.epoch:
            bound.schedules.advance(bound.schedules.epoch, progress.current_epoch + 1)
        slot[0] = _BATCH_END
        progress.batches_done = batch_idx + 1
        if window_ends:
            window.batches_done = 0
            progress.stepped_batches += 1
            if not stepped:
                for observe in bound.without_step:
                    observe(output)
        else:
            window.batches_done = position
        if flushes:
            progress.flush_due = True
            bound.flushed_window += bound.log_every
        for hook in bound.batch_end:
            hook(outputs_for_hooks(output), batch, batch_idx)
        if run.stop is not None:  # a signal or another thread may have set ``run.stop``
            run.stop.at_batch_end()
        if progress.loss_wanted:  # a progress bar's thread sets ``loss_wanted``
            read_loss(run, output)

        if is_last:
            next(batches, None)  # exhaust the loader before validation, as a plain loop does
        if uneven:
            bound.uneven.end()
        if flushes or bound.has_follow_up:
            after_batch(run, bound)
            book.enter(scope)
        if progress.global_step >= limits.max_steps or (progress.should_stop and not is_last and run.may_stop()):
            break
        if bound.keep_start is not None and window.batches_done == 0:
            bound.keep_start()
        slot[0] = _FETCH
    if progress.shows_loss:
        read_loss(run, output)


def read_loss(run: Run, output: Any) -> None:
    """Show the loss in ``output`` (the step's result) in the progress bar, unless the module logs values to the bar."""
    loss, number = outputs_for_hooks(output).get("loss"), None
    logs = any(each.prog_bar for each in run.book.logged("train"))
    if isinstance(loss, Tensor) and loss.numel() == 1 and not logs:
        with suppress(RuntimeError):  # reading a value from a device may raise
            number = loss.item()
    run.progress.show_loss(number)


def after_batch(run: Run, bound: Bound) -> None:
    """Finish a batch: flush the log, validate, step the schedulers that monitor a value.

    ``progress.phase`` and ``progress.flush_due`` record which actions are done. If an exception interrupts this
    function, and a callback then saves a checkpoint, the resumed run skips the actions that are done.
    """
    progress, window = run.progress, run.window
    phase = progress.phase
    if progress.flush_due:
        progress.enter(Phase.LOG_FLUSH)
        rows = run.book.step_values("train")
        try:
            run.publish(run.book.agree_on_steps(rows), progress.logger_step)
        except BaseException:
            run.book.put_back(rows)  # so that a checkpoint contains the values that are not logged yet
            raise
        run.agree_to_stop()
        progress.flush_due = False
    validates = (
        bound.validates
        and phase is not Phase.VALIDATED
        and not validates_late(run)
        and (phase is Phase.VALIDATION_DUE or validation_due(run, bound.validate_every, progress.is_last_batch))
    )
    if validates:
        run.hooks.notify("before_validation")  # called before the validation frees the batch
        validate(run, only_stops(run, bound.validate_every, progress.is_last_batch))
    if window.batches_done == 0 and progress.stepped and bound.schedules.step_plateau:
        bound.schedules.advance_step(bound.schedules.step_plateau)
    progress.enter(Phase.FETCH)
    if validates and window.batches_done > 0 and bound.keep_start is not None:
        bound.keep_start()  # so that a resumed run does not validate again


def validates_late(run: Run) -> bool:
    """Whether a due validation must wait for the epoch's end hooks. This is so if ``run.validates_last`` is true and no
    training batch follows.
    """
    progress = run.progress
    return run.validates_last and (progress.is_last_batch or (progress.should_stop and run.may_stop()))


def validate_late(run: Run) -> None:
    """Validate after the epoch's end hooks, if a validation is due and has not run."""
    progress = run.progress
    if not validates_late(run) or not validates_in(run, progress.current_epoch) or progress.phase is Phase.VALIDATED:
        return
    every = val_check_every(run.limits, progress.num_training_batches)
    if progress.phase is Phase.VALIDATION_DUE or validation_due(run, every, progress.is_last_batch):
        validate(run, only_stops(run, every, progress.is_last_batch))


def validate(run: Run, extra: bool) -> None:
    """Validate inside a fit.

    ``extra``: this validation runs only because of a request to stop. Without the request, the run would not validate
    here. The function therefore restores the random generators after an extra validation.
    """
    progress = run.progress
    run.kept.before_validation = validation_start(run)
    progress.enter(Phase.VALIDATION_DUE)
    if not run.holds_gradients:
        run.hooks.call_method("on_validation_model_zero_grad")
    run.book.refresh()  # callbacks may read the logged training values
    if run.loaders.reload("validate", run.limits.reload_every):
        run.loaders.tried.discard("validate")
    loaders = run.loaders.evaluation("validate")
    run.loaders.count_evaluation("validate")
    with draws_undone(run, [source.loader for source in loaders]) if extra else nullcontext():
        evaluate(run, "validate", loaders)
    run.agree_to_stop()
    progress.enter(Phase.VALIDATED)
    run.book.begin("train")
    run.clock.restart()


@contextmanager
def draws_undone(run: Run, loaders: Sequence[Any]) -> Iterator[None]:
    """Context that restores the random generators at its end. A checkpoint saved inside the context contains the
    generators' states from before the context.
    """
    new = [part for loader in loaders for part in parts_of(loader) if kept_iterator(part) is None]
    run.kept.draws_undone = True
    try:
        with isolate_rng(), generators_kept(loaders), workers_kept(new):
            yield
    finally:
        run.kept.draws_undone = False


# ---- the batches of an epoch, and the step bound to them -------------------------------------------------------------


def batches_and_step(run: Run, loader: Any, resumed: Resumed | None = None) -> tuple[Batches, Bound]:
    """Return the batches of a new epoch, or the remaining batches of a resumed epoch, and a :class:`Bound` object."""
    batches = _batches(run, loader, resumed)
    if run.hooks.spans is not None:
        batches = run.hooks.spans.batches("train", batches)
    run.batches = _iterator_for_step(run, batches)
    return batches, Bound(run)


def _batches(run: Run, loader: Any, resumed: Resumed | None) -> Batches:
    move, transfer = run.transfer
    passes, num_batches = run.loaders.passes(), run.loaders.count_own_training()
    source = feed(passes, num_batches, None if transfer else move, fetches_ahead(loader, num_batches), resumed)
    if run.window.gather is None:
        return source
    uneven = run.uneven = UnevenInputs(run, loader)
    done = 0 if resumed is None else resumed.done
    data, can_resume = run.engine.strategy.data, done < num_batches or passes.can_repeat
    asked = data.gather_objects((num_batches, can_resume, order_shared(loader)))
    check_orders([order for *_, order in asked], data.ranks, "training")
    counts = [count for count, *_ in asked]
    check_counts(counts, "training")
    longest = max(counts)
    run.progress.expect_batches(longest)  # ranks may have different numbers of batches
    if resumed is not None and longest == ENDLESS:
        raise CheckpointError(
            "The checkpoint was saved in the middle of an epoch, by one of several processes whose loader has no "
            "length, so they had fetched ahead. Resume from one that was saved at the end of an epoch."
        )
    if done < longest and not all(can for _, can, _ in asked):
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
    return uneven.over(source, counts, done)


def _iterator_for_step(run: Run, batches: Batches) -> BatchIterator | None:
    """Return the iterator for a ``training_step`` that fetches its batches itself; ``None`` for any other step."""
    if not takes_iterator(run.module.training_step):
        return None
    if run.limits.accumulate > 1:
        raise ConfigurationError(
            f"{type(run.module).__name__}.training_step takes dataloader_iter, so it is unknown which batches "
            f"accumulate_grad_batches={run.limits.accumulate} counts. Accumulate inside the step, and write 1."
        )
    progress = run.progress

    def advance(is_last: bool) -> int:
        progress.batch_idx += 1
        progress.is_last_batch = is_last
        return progress.batch_idx

    return BatchIterator(batches, advance, run.transfer[1])
