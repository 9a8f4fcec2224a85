"""The training loop.

::

    sanity check; on_train_start
    while not done:                          one epoch
        on_train_epoch_start                 resume.py: start it, or resume the one of the checkpoint
        for batch in batches:                epoch.py; hop 1: fetched, on the device
            on_train_batch_start             hop 2
            step                             hops 3 to 5: training_step, backward, optimizer
            schedulers; on_train_batch_end
            flush the log; validate          hop 6
        on_train_epoch_end
    on_train_end
"""

from __future__ import annotations

import time

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.errors import ConfigurationError
from drivetrain.loops.epoch import run_batches, validate_late
from drivetrain.loops.evaluate import agree_on_counts
from drivetrain.loops.oversights import (
    PATIENCE,
    check_manual_steps,
    check_parameters,
    no_batches,
    warn_of_eval_mode,
    warn_of_what_never_comes,
    watch_losses,
)
from drivetrain.loops.progress import Phase
from drivetrain.loops.resume import enter_epoch, restore_random_state, restore_results, restore_validation_loaders
from drivetrain.loops.run import Run, val_check_every
from drivetrain.loops.sanity import sanity_check
from drivetrain.loops.schedules import Schedules


def fit(run: Run) -> None:
    """Train until ``max_epochs``, ``max_steps`` or a request to stop."""
    from drivetrain.loops.watch import FitWatch  # here, so that importing the Trainer stays quick

    progress = run.progress
    _prepare(run)
    inside_an_epoch = run.restart is not None and (progress.epoch_ending or progress.batches_done > 0)
    if run.training_done() and not inside_an_epoch:
        _say_why_nothing_is_trained(run)
        restore_random_state(run)
        return
    run.hooks.call("on_train_start")
    warn_of_eval_mode(run)
    check_parameters(run)
    run.losses = watch_losses(run)
    watch = FitWatch(run)
    steps_before = progress.global_step
    run.validated_at = time.monotonic()
    while run.restart is not None or not run.training_done():
        epoch = enter_epoch(run)
        if epoch is not None:
            watch.epoch_began()
            windows = progress.stepped_batches
            run_batches(run, *epoch)
            watch.batches_ended()
            if run.losses is not None and progress.stepped_batches == windows:  # on_train_batch_start has ended it
                run.losses.count_missed()
            check_manual_steps(run, steps_before)
            _end_epoch(run)
        _close_epoch(run)
        if epoch is not None:
            watch.epoch_closed()
    watch.ended()
    if inside_an_epoch and progress.restarting:
        _say_why_nothing_is_trained(run)
    _check_batches(run)
    _warn_of_the_unlogged(run)
    progress.enter(Phase.TRAIN_END)
    run.hooks.call("on_train_end")


class _Patience:
    """Ends a trial that makes no optimizer step any more: what the module skips at one step, it may skip for ever.

    Args:
        run: of the trial, which no number of epochs ends.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._step, self._windows = run, 0, 0

    def missed(self, output: object) -> None:
        """A window, or an epoch that had none, has ended without an optimizer step."""
        progress = self._run.progress
        self._windows = self._windows + 1 if progress.global_step == self._step else 1
        self._step = progress.global_step
        if self._windows == PATIENCE:
            progress.ask_to_stop()
            rank_zero_warn(
                f"The trial of {self._run.limits.max_steps:.0f} optimizer steps ends after {self._step}: the next "
                f"{PATIENCE} windows made none. Let {type(self._run.module).__name__}.training_step return a loss, "
                "whatever global_step is."
            )


def try_steps(run: Run) -> None:
    """Train up to ``max_steps`` like :func:`fit`, for a trial: nothing is looked for that a user should be told."""
    _prepare(run)
    run.hooks.call("on_train_start")
    run.losses = patience = _Patience(run)
    progress = run.progress
    while not run.training_done():
        windows = progress.stepped_batches
        epoch = enter_epoch(run)
        assert epoch is not None  # a trial resumes nothing
        run_batches(run, *epoch)
        if progress.stepped_batches == windows:  # on_train_batch_start has ended the epoch
            patience.missed(None)
        _end_epoch(run)
        _close_epoch(run)
    progress.enter(Phase.TRAIN_END)
    run.hooks.call("on_train_end")


def _prepare(run: Run) -> None:
    """Run the sanity check, make the training loader, and check the arguments that depend on its length."""
    progress, limits = run.progress, run.limits
    if run.saves_on_exception:
        run.hooks.completes = frozenset({"on_train_batch_end", "on_validation_end", "on_train_epoch_end"})
    if run.restart is not None:
        run.agree_to_stop()  # a callback may ask again for what it had asked before the checkpoint
        run.loaders.restore_ages(run.restart.get("loaders", {}))
    sanity_check(run)
    restore_validation_loaders(run)
    restore_results(run)
    progress.enter(Phase.TRAIN_START)
    run.book.begin("train")
    if limits.max_epochs == 0 or limits.max_steps == 0:
        return  # nothing but set-up and teardown: the loader is not even asked for
    progress.expect_batches(run.loaders.count_training())
    if limits.val_batches != 0 and run.loaders.defined("validate") and run.loaders.is_known("validate"):
        loaders = run.loaders.evaluation("validate")
        agree_on_counts(run, "validate", loaders)
        if loaders and not run.validates():
            rank_zero_warn(no_batches([source.loader for source in loaders], "validate"))
    validates = run.validates()
    if validates:
        val_check_every(limits, progress.num_training_batches)
    warn_of_what_never_comes(run, validates)
    if run.restart is None and parity.current().early_iterators:
        from drivetrain.loops.early import start_first_epoch  # here, so that importing the Trainer stays quick

        start_first_epoch(run)


def _end_epoch(run: Run) -> None:
    progress, book, schedules = run.progress, run.book, Schedules.of(run)
    if progress.batch_idx == -1:
        raise ConfigurationError(
            f"The training loader {type(run.loaders.training()).__name__} yielded no batch in epoch "
            f"{progress.current_epoch}. Pass an object that can be iterated again in each epoch, not a generator."
        )
    book.leave_batch()
    run.agree_to_stop()
    stopped = progress.global_step >= run.limits.max_steps or progress.should_stop
    cut = stopped and not progress.is_last_batch
    ended_at_last = progress.is_last_batch and progress.batches_done > progress.batch_idx
    if not (ended_at_last or cut):  # on_train_batch_start returned -1, or the loader's length was wrong
        schedules.advance(schedules.epoch, progress.current_epoch + 1)
    book.agree_on_epoch("train")  # callbacks look at it in the hook, and that may log more
    progress.end_epoch(cut)
    book.end_epoch()
    run.hooks.call("on_train_epoch_end")


def _close_epoch(run: Run) -> None:
    """What comes after the hooks of an epoch's end, those that save included.

    A run that resumes here logs the epoch's row, whether or not the earlier run still did: better twice than not at
    all. The schedulers come last, so that nothing that fails after them could let them step twice.
    """
    progress, book = run.progress, run.book
    if run.validates_last:
        validate_late(run)
    book.agree_on_epoch("train")
    run.agree_to_stop()
    book.refresh()
    run.publish(book.epoch_values("train"), progress.logger_step)
    rest = book.step_values("train")
    book.read([row for row in rest if row.entry.to_bar])  # so that an epoch without a flush shows its numbers too
    if progress.stepped_batches < run.limits.log_every_n_steps:
        run.unlogged.update(row.name for row in rest if row.entry.to_logger and run.log is not None)
    if not progress.epoch_cut:  # its rest may still come, in a run that resumes here
        schedules = Schedules.of(run)
        schedules.advance(schedules.epoch_plateau, progress.current_epoch + 1)
        if run.settings.fast_dev_run:
            schedules.check_watched()
    book.reset("train")
    progress.close_epoch()
    if run.limits.train_batches == 0:
        progress.expect_batches(0)  # training was switched off meanwhile: there is no further epoch


def _warn_of_the_unlogged(run: Run) -> None:
    steps, every = run.progress.stepped_batches, run.limits.log_every_n_steps
    if run.unlogged and 0 < steps < every:  # with none, the first window was still open when the fit was asked to stop
        rank_zero_warn(
            f"{', '.join(sorted(run.unlogged))}: logged in training steps, but after {steps} steps no logger has seen "
            f"it, because log_every_n_steps={every}. Write a smaller log_every_n_steps."
        )


def _say_why_nothing_is_trained(run: Run) -> None:
    progress, limits = run.progress, run.limits
    _check_batches(run)
    if "nothing to train" in run.told:
        return
    rank_zero_info(
        f"Nothing to train: {progress.current_epoch} of {limits.max_epochs} epochs and {progress.global_step} of "
        f"{limits.max_steps} steps are done."
        + (" limit_train_batches is 0." if limits.train_batches == 0 else "")
        + (" A request to stop is in force." if progress.should_stop else "")
    )


def _check_batches(run: Run) -> None:
    """Check that training has not ended because the loader has nothing to train on.

    Raises:
        ConfigurationError: it has.
    """
    progress, limits = run.progress, run.limits
    asked_for = 0 in (limits.max_epochs, limits.max_steps, limits.train_batches)
    if progress.num_training_batches == 0 and not asked_for:
        raise ConfigurationError(no_batches(run.loaders.training()))
