"""The training loop, with the stages 1 to 6 of a batch as ARCHITECTURE.md numbers them.

::

    sanity check; on_train_start
    while not done:                          one epoch
        on_train_epoch_start                 resume.py: start an epoch, or resume the checkpoint's
        for batch in batches:                epoch.py; 1: fetched, on the device
            on_train_batch_start             2
            step                             3 to 5: training_step, backward, optimizer
            schedulers; on_train_batch_end
            flush the log; validate          6
        on_train_epoch_end
    on_train_end
"""

from __future__ import annotations

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError
from drivetrain.loops.early import start_first_epoch
from drivetrain.loops.epoch import run_batches, validate_late
from drivetrain.loops.evaluate import agree_on_counts
from drivetrain.loops.loaders import no_batches
from drivetrain.loops.progress import Phase
from drivetrain.loops.resume import enter_epoch, restore_random_state, restore_results, restore_validation_loaders
from drivetrain.loops.run import Run, val_check_every
from drivetrain.loops.sanity import sanity_check
from drivetrain.loops.schedules import Schedules


def fit(run: Run) -> None:
    """Train until ``max_epochs``, ``max_steps`` or a request to stop."""
    progress = run.progress
    _prepare(run)
    begun = progress.batches_done > 0 and progress.current_epoch < run.limits.max_epochs
    inside_an_epoch = run.restart is not None and (progress.epoch_ending or begun)
    if run.training_done() and not inside_an_epoch:
        _check_batches(run)
        run.hooks.notify("nothing_trained")
        restore_random_state(run)
        return
    run.hooks.call("on_train_start")
    run.clock.restart()
    while run.restart is not None or not run.training_done():
        epoch = enter_epoch(run)
        if epoch is not None:
            run_batches(run, *epoch)
            run.hooks.notify("batches_ended")
            _end_epoch(run)
        _close_epoch(run)
        run.hooks.notify("epoch_closed")
    _check_batches(run)
    if inside_an_epoch and progress.restarting:
        run.hooks.notify("nothing_trained")
    progress.enter(Phase.TRAIN_END)
    run.hooks.call("on_train_end")


def _prepare(run: Run) -> None:
    """Run the sanity check, create the training loader, and check the arguments that depend on the loader's length."""
    progress, limits = run.progress, run.limits
    if run.kept.saves_on_exception:
        run.hooks.completes = frozenset({"on_train_batch_end", "on_validation_end", "on_train_epoch_end"})
    if run.restart is not None:
        run.agree_to_stop()  # a restored callback may request the stop again
        run.loaders.restore_ages(run.restart.get("loaders", {}))
    sanity_check(run)
    restore_validation_loaders(run)
    restore_results(run)
    progress.enter(Phase.TRAIN_START)
    run.book.begin("train")
    if limits.max_epochs == 0 or limits.max_steps == 0:
        return  # no batch will be trained, so no loader is created
    progress.expect_batches(run.loaders.count_training())
    if limits.val_batches != 0 and run.loaders.defined("validate") and run.loaders.is_known("validate"):
        loaders = run.loaders.evaluation("validate")
        agree_on_counts(run, "validate", loaders)
        if loaders and not run.validates():
            rank_zero_warn(no_batches([source.loader for source in loaders], "validate"))
    if run.validates():
        val_check_every(limits, progress.num_training_batches)
    if run.restart is None and parity.current().early_iterators:
        start_first_epoch(run)


def _end_epoch(run: Run) -> None:
    progress, book, schedules = run.progress, run.book, Schedules(run)
    if progress.batch_idx == -1:
        raise ConfigurationError(
            f"The training loader {type(run.loaders.training()).__name__} yielded no batch in epoch "
            f"{progress.current_epoch}. Pass an object that can be iterated again in each epoch, "
            "not a generator. [DT1020]"
        )
    book.leave_batch()
    run.agree_to_stop()
    stopped = progress.global_step >= run.limits.max_steps or progress.should_stop
    cut = stopped and not progress.is_last_batch
    ended_at_last = progress.is_last_batch and progress.batches_done > progress.batch_idx
    if not (ended_at_last or cut):  # no batch was marked as the last: a hook returned -1, or the loader ended early
        schedules.advance(schedules.epoch, progress.current_epoch + 1)
    book.agree_on_epoch("train")  # callbacks may read all ranks' values in the next hook
    progress.end_epoch(cut)
    book.end_epoch()
    run.hooks.call("on_train_epoch_end")


def _close_epoch(run: Run) -> None:
    """Log the epoch's values after its end hooks, step the schedulers that monitor a value, and count the epoch.

    If an end hook has saved a checkpoint, a run that resumes from it calls this function again. The epoch's values may
    then be logged twice, which is better than not at all. The schedulers step last, because an exception after their
    step would make a resumed run step them twice.
    """
    progress, book = run.progress, run.book
    if run.validates_last:
        validate_late(run)
    book.agree_on_epoch("train")
    run.agree_to_stop()
    book.refresh()
    run.publish(rows := book.epoch_values("train"), progress.logger_step)
    rest, final = book.step_values("train"), {row.name for row in rows if row.entry.to_bar}
    # The progress bar shows these values even if no log flush was due. If a name also has a value for the epoch, the
    # bar shows the epoch's value.
    book.read([row for row in rest if row.entry.to_bar and row.name not in final])
    run.hooks.notify("values_left", rest)
    if not progress.epoch_cut:  # else a resumed run may complete the epoch, and step the schedulers
        schedules = Schedules(run)
        schedules.advance(schedules.epoch_plateau, progress.current_epoch + 1)
        if run.settings.fast_dev_run:
            schedules.check_watched()
    book.reset("train")
    progress.close_epoch()
    if run.limits.train_batches == 0:
        progress.expect_batches(0)  # no epoch follows, because user code has set the limit to 0


def _check_batches(run: Run) -> None:
    """Raise if training has ended because the loader has no batches.

    Raises:
        ConfigurationError: the training loader has no batches.
    """
    progress, limits = run.progress, run.limits
    asked_for = 0 in (limits.max_epochs, limits.max_steps, limits.train_batches)
    if progress.num_training_batches == 0 and not asked_for:
        raise ConfigurationError(no_batches(run.loaders.training()))
