"""The progress of a run: its phase, and its step, batch and epoch counters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from typing import Any


class TrainerFn(str, Enum):
    """A method of the Trainer that starts a run; ``str(TrainerFn.FITTING)`` is "fit"."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    __str__ = str.__str__


class RunningStage(str, Enum):
    """The stage that is running."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether the module is evaluated, including the sanity check before training."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The word for the stage in names such as ``val_dataloader``: "train", "val", "test" or "predict"."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


class TrainerStatus(str, Enum):
    """The state of the last call of ``fit``, ``validate``, ``test`` or ``predict``."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the call has ended, normally or by an exception."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class Phase(IntEnum):
    """The phase of a run. The tens digit is the stage: see :attr:`Progress.loop_stage`.

    An epoch begins with EPOCH_START. Each batch goes through FETCH to LOG_FLUSH; a validation may follow. The epoch
    ends with EPOCH_END and BETWEEN_EPOCHS.

    Attributes:
        SET_UP: ``fit``, ``validate``, ``test`` or ``predict`` was called, but its loop has not begun.
        FETCH: the loop waits for a batch. BATCH_START: hooks before the step. FORWARD: ``training_step``.
        OPTIMIZER_STEP: includes the learning-rate schedulers. BATCH_END: hooks after the step.
        VALIDATION_DUE: a validation is about to begin. VALIDATED: a validation has ended, but the loop has not finished
            the training batch that preceded the validation.
        EPOCH_END: the epoch's batches are done, and its end hooks are running.
        BETWEEN_EPOCHS: an epoch has ended completely, and the next epoch has not begun.
    """

    NONE = 0
    SET_UP = 1
    TRAIN_START = 10
    EPOCH_START = 11
    FETCH = 12
    BATCH_START = 13
    FORWARD = 14
    BACKWARD = 15
    OPTIMIZER_STEP = 16
    BATCH_END = 17
    LOG_FLUSH = 18
    VALIDATION_DUE = 19
    VALIDATED = 20
    EPOCH_END = 21
    BETWEEN_EPOCHS = 22
    TRAIN_END = 23
    SANITY_START = 30
    SANITY_FETCH = 31
    SANITY_BATCH = 32
    SANITY_END = 33
    VALIDATION_START = 40
    VALIDATION_FETCH = 41
    VALIDATION_BATCH = 42
    VALIDATION_END = 43
    TEST_START = 50
    TEST_FETCH = 51
    TEST_BATCH = 52
    TEST_END = 53
    PREDICT_START = 60
    PREDICT_FETCH = 61
    PREDICT_BATCH = 62
    PREDICT_END = 63


_PHASES: Mapping[int, Phase] = {int(phase): phase for phase in Phase}
"""The phases by number. A lookup in this dictionary is faster than ``Phase(number)``, which makes two calls."""

_STAGES: Sequence[RunningStage | None] = (None, RunningStage.TRAINING, *RunningStage)
"""For each tens digit of a phase, the stage. 0: no stage; 1 and 2: training; 3 to 6: the other stages."""


def phase_name(number: int) -> str:
    """Return the name of a phase in lower case, with spaces."""
    return Phase(number).name.lower().replace("_", " ")


@dataclass(slots=True)
class Progress:
    """The counters of one Trainer, which callbacks, loggers and the progress bar's thread read.

    The methods of this class write most counters. The training loop (``loops/epoch.py``) writes the counters of its
    batches, the step (``loops/step.py``) writes ``global_step``, and the evaluation loop (``loops/evaluate.py``) writes
    ``eval_batch_idx``.

    Attributes:
        slot: four integers, which another thread can read. The loops write these integers directly, because a method
            call takes time. 0: the :class:`Phase`. 1: the number of training and evaluation batches that have begun. 2:
            ``global_step`` at the start of the last training batch. 3: the number of open contexts of :meth:`storing`.
        resume_phase: the phase at which a resumed loop will continue. It is set if the checkpoint was saved in a
            validation or in an epoch's end hooks, or if the fit completes an epoch that ended early; else ``None``. The
            loop resets it to ``None`` when it continues.
        fn, status: the Trainer's method that was called, and the state of the call.
        current_epoch: the number of completed epochs, and so the index of the running epoch, from 0.
        batch_idx: the index of the current batch in its epoch, from 0; -1 before the first batch.
        batches_done: the number of batches of the current epoch whose hooks have all run.
        earlier_batches: the number of batches in all epochs that have ended; ``total_batches`` also counts the current
            epoch.
        global_step: the number of optimizer steps.
        stepped_batches: the number of finished windows (the batches of one optimizer step), including windows whose
            optimizer step was skipped. The loggers' x axis is the index of the last finished window (``logger_step``).
            The x axis is not ``global_step``, because ``global_step`` counts the steps of each optimizer.
        num_training_batches: the number of batches per epoch; ``inf`` if the loader has no length.
        stepped: whether the last batch's optimizer step happened.
        flush_due: the loop has not yet sent the last batch's logged values to the loggers.
        cut_batches: the number of the epoch's batches, if a limit or a request to stop ended the epoch early; else -1.
        is_last_batch: whether the current batch is the last of its epoch.
        end_began: the epoch's end hooks have begun. The hooks, or a validation after the hooks, may still be running.
        resumed_batches: ``total_batches`` when a checkpoint was restored; -1 if no checkpoint was restored.
        should_stop: a callback, the module or the user asked the run to end. The run ends once it has reached
            min_epochs and min_steps.
        eval_batch_idx, num_eval_batches: the index of the current batch, and the number of batches, in the current
            evaluation.
        eval_steps: for each stage, the number of batches that each evaluation loader has yielded so far. This number is
            the x axis of the values that an evaluation logs per step.
        loss: the last loss that was read for a progress bar, or ``None``. shows_loss: a progress bar shows the loss.
        loss_wanted: whether the loop should read the loss after the hooks of the running batch.
    """

    slot: list[int] = field(default_factory=lambda: [int(Phase.NONE), 0, 0, 0])
    resume_phase: Phase | None = None
    fn: TrainerFn | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING
    current_epoch: int = 0
    batch_idx: int = -1
    batches_done: int = 0
    earlier_batches: int = 0
    global_step: int = 0
    stepped_batches: int = 0
    num_training_batches: float = 0
    stepped: bool = False
    flush_due: bool = False
    cut_batches: int = -1
    is_last_batch: bool = False
    end_began: bool = False
    resumed_batches: int = -1
    should_stop: bool = False
    eval_batch_idx: int = -1
    num_eval_batches: float = 0
    eval_steps: dict[str, list[int]] = field(default_factory=dict)
    loss: float | None = None
    shows_loss: bool = False
    loss_wanted: bool = False

    # ---- the position of the run -------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The current phase. Before a resumed loop continues, the result is ``resume_phase`` if it is set."""
        return _PHASES[self.slot[0]] if self.resume_phase is None else self.resume_phase

    @property
    def loop_stage(self) -> RunningStage | None:
        """The running stage: training or an evaluation; ``None`` outside the loops."""
        return _STAGES[self.slot[0] // 10]

    @property
    def stage(self) -> RunningStage | None:
        """The running stage. During set-up and teardown: the stage for which the Trainer was called."""
        if self.slot[0] != Phase.SET_UP or self.fn is None:
            return self.loop_stage
        return RunningStage.TRAINING if self.fn is TrainerFn.FITTING else RunningStage(self.fn.value)

    @property
    def has_trained(self) -> bool:
        """Whether the loop of a fit is running, after its sanity check."""
        return self.loop_stage in (RunningStage.TRAINING, RunningStage.VALIDATING)

    @property
    def epoch_ending(self) -> bool:
        """Whether the epoch's end hooks, or a validation after these hooks, are running."""
        return self.end_began or self.phase is Phase.EPOCH_END

    @property
    def between_epochs(self) -> bool:
        """Whether an epoch has ended completely, and the next epoch has not begun."""
        return self.phase in (Phase.BETWEEN_EPOCHS, Phase.TRAIN_END)

    @property
    def validation(self) -> str:
        """The state of a validation in a fit: "running", "done", or "". "done": the validation has ended, but the loop
        has not finished the training batch that preceded it.
        """
        phase = self.phase
        if self.fn is not TrainerFn.FITTING and self.resume_phase is None:
            return ""
        if phase is Phase.VALIDATION_DUE or Phase.VALIDATION_START <= phase < Phase.VALIDATION_END:
            return "running"
        return "done" if phase in (Phase.VALIDATION_END, Phase.VALIDATED) else ""

    @property
    def in_batch(self) -> bool:
        """Whether a training batch is in progress, including the hooks before its step."""
        return Phase.BATCH_START <= self.phase <= Phase.OPTIMIZER_STEP

    @property
    def epochs_done(self) -> int:
        """Number of epochs whose last batch is done. An epoch whose end hooks are running is counted."""
        return self.current_epoch + self.epoch_ending

    @property
    def epoch_cut(self) -> bool:
        """Whether a limit or a request to stop has ended the epoch before its last batch."""
        return self.cut_batches >= 0

    @property
    def finished(self) -> bool:
        """Whether the run has ended normally."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the run has ended, normally or by an exception."""
        return self.status.stopped

    @property
    def total_batches(self) -> int:
        """Number of finished training batches in all epochs."""
        return self.earlier_batches + self.batches_done

    @property
    def restarting(self) -> bool:
        """Whether the run has resumed from a checkpoint, and has not finished a batch since then."""
        return self.resumed_batches == self.total_batches

    @property
    def logger_step(self) -> int:
        """Index of the last finished window (the batches of one optimizer step), from 0: the loggers' x axis."""
        return max(self.stepped_batches - 1, 0)

    # ---- changes -----------------------------------------------------------------------------------------------------

    def begin_run(self, fn: TrainerFn) -> None:
        """Reset the counters and flags of the Trainer's previous run, except the numbers of steps and epochs."""
        self.fn, self.status, self.slot[0], self.resume_phase = fn, TrainerStatus.RUNNING, Phase.SET_UP, None
        self.batch_idx, self.batches_done, self.eval_batch_idx = -1, 0, -1
        self.is_last_batch = self.should_stop = self.flush_due = self.stepped = self.end_began = False
        if fn is TrainerFn.FITTING:
            self.num_training_batches = 0  # the loader of this run may have another length
        else:
            self.cut_batches = -1  # only a fit can be in an epoch
        self.resumed_batches = -1
        self.loss, self.shows_loss, self.loss_wanted = None, False, False

    def end_run(self, interrupted: bool = False) -> None:
        """Called when ``fit`` or another method of the Trainer ends. ``interrupted``: whether an exception ended it.
        In this case, the phase stays unchanged.
        """
        if interrupted:
            self.status = TrainerStatus.INTERRUPTED
        else:
            self.status, self.slot[0] = TrainerStatus.FINISHED, Phase.NONE

    def take_over(self, other: Progress) -> None:
        """Copy everything from ``other``, the progress of the same run in another process."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def show_in(self, words: Any) -> Any:
        """Replace :attr:`slot` by ``words``, an object with four integers; return the previous object."""
        before, self.slot = self.slot, words
        return before

    def enter(self, phase: Phase) -> None:
        """Set the phase. Inside a batch, the loops do not call this method, but write the phase into :attr:`slot`."""
        self.slot[0] = phase

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Context in which :attr:`slot` records that the run waits for a checkpoint to be saved. Contexts can be
        nested.
        """
        self.slot[3] += 1
        try:
            yield
        finally:
            self.slot[3] -= 1

    def start_epoch(self) -> None:
        """Called when a training epoch begins."""
        self.batch_idx, self.batches_done, self.is_last_batch, self.cut_batches = -1, 0, False, -1
        self.end_began = False
        self.slot[0], self.resume_phase = Phase.EPOCH_START, None

    def resume_at(self, phase: Phase) -> None:
        """Enter ``resume_phase``, the phase of the checkpoint; enter ``phase`` if ``resume_phase`` is ``None``."""
        self.slot[0] = phase if self.resume_phase is None else self.resume_phase
        self.resume_phase = None

    def count_batches_as(self, batches: int) -> None:
        """Set the number of finished batches of a resumed epoch, converted to this run's batch size."""
        self.batches_done, self.batch_idx = batches, batches - 1
        self.cut_batches = batches if self.epoch_cut else -1
        self.resumed_batches = self.total_batches

    def count_epochs_as(self, epochs: int) -> None:
        """Set the number of finished epochs. ``drivetrain.legacy`` lowers the number to train the last epoch again."""
        self.current_epoch = epochs

    def expect_batches(self, count: float) -> None:
        """Set the number of training batches in an epoch."""
        self.num_training_batches = count

    def end_epoch(self, cut: bool) -> None:
        """Called after the epoch's last batch. ``cut``: whether a limit or a request to stop ended the epoch early."""
        self.cut_batches = self.batches_done if cut else -1
        self.slot[0], self.end_began = Phase.EPOCH_END, True

    def close_epoch(self) -> None:
        """Called after the epoch's end hooks, and after a validation that follows these hooks."""
        self.current_epoch += 1
        self.earlier_batches += self.batches_done
        self.batches_done, self.slot[0], self.end_began = 0, Phase.BETWEEN_EPOCHS, False

    def show_batch(self, batch_idx: int, is_last: bool) -> None:
        """Set the index of the current batch. Called before and after an earlier batch is computed again."""
        self.batch_idx, self.is_last_batch = batch_idx, is_last

    def count_steps(self, steps: int) -> None:
        """Count optimizer steps."""
        self.global_step += steps

    def want_loss(self) -> None:
        """Ask the loop to read the loss of the next batch. Any thread can call this method."""
        self.shows_loss = self.loss_wanted = True

    def show_loss(self, loss: float | None) -> None:
        """Set the loss that a progress bar shows. ``None``: the step returned no loss, and the bar does not change."""
        self.loss_wanted = False
        if loss is not None:
            self.loss = loss

    def count_once(self) -> None:
        """Set ``global_step`` as if the last batch had made exactly one optimizer step."""
        self.global_step, self.stepped = self.slot[2] + 1, True

    def ask_to_stop(self, stop: bool = True) -> None:
        """Request the end of the run, or withdraw an earlier request."""
        self.should_stop = stop

    def restore_eval_steps(self, eval_steps: dict[str, list[int]]) -> None:
        """Restore :attr:`eval_steps` after an evaluation whose batches do not count, such as a sanity check."""
        self.eval_steps = eval_steps

    def begin_evaluation_of(self, batches: float) -> None:
        """Called when a pass over an evaluation loader with ``batches`` batches begins."""
        self.num_eval_batches, self.eval_batch_idx = batches, -1

    def end_evaluation_of(self, stage: str, dataloader_idx: int) -> None:
        """Count the batches of a finished pass over an evaluation loader, so that the next pass logs its values at
        later steps.
        """
        self.eval_steps[stage][dataloader_idx] += self.eval_batch_idx + 1

    def eval_steps_of(self, stage: str, dataloader_idx: int) -> int:
        """Return how many batches the evaluation loader has yielded in earlier passes of the stage."""
        counts = self.eval_steps.setdefault(stage, [])
        counts.extend([0] * (dataloader_idx + 1 - len(counts)))
        return counts[dataloader_idx]

    # ---- for a checkpoint --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint."""
        state = {name: getattr(self, name) for name in _SAVED}
        state["cut_batches"] = max(self.cut_batches, 0)
        return {**state, "eval_steps": copied(self.eval_steps)}

    def deferred_state_dict(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the :meth:`state_dict` of this moment, even if the counters change before the
        call.
        """
        values, phase, eval_steps = _FIELDS(self), self.slot[0], self.eval_steps and copied(self.eval_steps)

        def state_dict() -> dict[str, Any]:
            then = Progress(*values)
            then.slot, then.eval_steps = [phase], eval_steps
            return then.state_dict()

        return state_dict

    def load_state_dict(self, state: dict[str, Any], goes_on: bool = True) -> None:
        """Restore a result of :meth:`state_dict`. ``goes_on``: whether this fit completes the saved epoch if that epoch
        ended early.
        """
        for name in _COUNTERS:
            if name in state:
                setattr(self, name, state[name])
        self.should_stop = self.should_stop or state.get("should_stop", False)
        self.resume_phase, self.end_began = _resume_phase(state), state.get("epoch_ending", False)
        self.cut_batches = state.get("cut_batches", 0) if state.get("epoch_cut") else -1
        if self.epoch_cut and goes_on:  # complete the epoch that ended early
            if not self.epoch_ending:
                self.current_epoch -= 1
                self.earlier_batches -= self.cut_batches
            self.batches_done, self.cut_batches = self.cut_batches, -1
            self.flush_due = self.stepped = self.end_began = False
            self.resume_phase = Phase.VALIDATED
        self.batch_idx = self.batches_done - 1
        self.resumed_batches = self.total_batches


def copied(eval_steps: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return an independent copy of :attr:`Progress.eval_steps`."""
    return {stage: list(counts) for stage, counts in eval_steps.items()}


def _resume_phase(state: dict[str, Any]) -> Phase | None:
    end = Phase.EPOCH_END if state.get("epoch_ending") else None
    return {"running": Phase.VALIDATION_DUE, "done": Phase.VALIDATED}.get(state.get("validation", ""), end)


_COUNTERS: Sequence[str] = (
    "current_epoch",
    "batches_done",
    "earlier_batches",
    "global_step",
    "stepped_batches",
    "is_last_batch",
    "stepped",
    "flush_due",
    "eval_steps",
)
_SAVED: Sequence[str] = (*_COUNTERS[:-1], "validation", "epoch_cut", "epoch_ending")
_FIELDS = operator.attrgetter(*(each.name for each in fields(Progress)))
