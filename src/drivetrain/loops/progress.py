"""Progress of a run: its phase, and its step, batch and epoch counters."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from typing import Any


class TrainerFn(str, Enum):
    """Which entry point of the Trainer was called. As text it is the entry point's name: f"{stage}" is "fit"."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    __str__ = str.__str__


class RunningStage(str, Enum):
    """What is running."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether the module is judged, the trial before training included."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """How the names of its loaders begin: "train", "val", "test" or "predict"."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


class TrainerStatus(str, Enum):
    """How the last entry point is doing."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class Phase(IntEnum):
    """What a run is doing. The tens tell the stage: see :attr:`Progress.loop_stage`.

    An epoch of a fit goes through EPOCH_START, then for each batch FETCH to LOG_FLUSH, with a validation in between
    where one is due, then EPOCH_END and BETWEEN_EPOCHS.

    Attributes:
        SET_UP: an entry point was called, and its loop has not begun.
        FETCH: the loop waits for a batch. BATCH_START: hooks before the step. FORWARD: ``training_step``.
        OPTIMIZER_STEP: with the learning-rate schedulers. BATCH_END: hooks after the step.
        VALIDATION_DUE: a validation is about to begin. VALIDATED: it is over, and its batch is not left yet.
        EPOCH_END: the epoch's batches are over, and its end hooks are running.
        BETWEEN_EPOCHS: an epoch is closed, and the next has not begun.
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


_STAGES = (
    None,
    RunningStage.TRAINING,
    RunningStage.TRAINING,
    RunningStage.SANITY_CHECKING,
    RunningStage.VALIDATING,
    RunningStage.TESTING,
    RunningStage.PREDICTING,
)

_STAGE_OF = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


@dataclass(slots=True)
class Progress:
    """The counters of one Trainer. Callbacks, loggers and the progress bar's thread read them.

    Each counter is written in one place. The methods of this class write most of them; the training loop
    (``loops/epoch.py``) writes those of its batches, the step (``loops/step.py``) ``global_step``, and the evaluation
    loop (``loops/evaluate.py``) ``eval_batch_idx``.

    Attributes:
        slot: integers that the loops write without a call, and another thread can read: the :class:`Phase`; how many
            batches have begun, in training and evaluation together; ``global_step`` when the last one of training did.
        resume_phase: while a run that resumes is being set up, the phase in which the checkpoint was saved, if that
            was behind an epoch's batches or in a validation; else ``None``.
        fn, status: which entry point was called, and how it is doing.
        current_epoch: epochs whose last batch is done; while one runs, its index from 0.
        batch_idx: index of the current batch in its epoch, from 0; -1 before the first.
        batches_done: batches of the current epoch whose hooks have all run.
        earlier_batches: batches of all epochs that have ended; ``total_batches`` adds the current one's.
        global_step: optimizer steps.
        stepped_batches: windows done, whether or not their step happened. The loggers' x axis is the index of the last,
            ``logger_step``: with several optimizers ``global_step`` would count each batch more than once.
        num_training_batches: per epoch; ``inf`` where the loader has no length.
        stepped: the last batch's optimizer step happened.
        flush_due: the last batch's logged values are still to be read.
        cut_batches: how many batches were done of an epoch that a limit or a request to stop ended early; -1: it was
            not ended early.
        is_last_batch: the current batch is the last of its epoch.
        end_began: the hooks of the epoch's end have begun; a validation may follow them.
        resumed_batches: ``total_batches`` when a checkpoint was restored; -1 where none was.
        should_stop: a callback, the module or the user asked the run to end; honoured once min_epochs and min_steps
            are reached.
        eval_batch_idx, num_eval_batches: the same for the evaluation that runs now.
        eval_steps: by stage, the batches of each evaluation loader so far: the x axis of their per-step values.
    """

    slot: array[int] = field(default_factory=lambda: array("q", [Phase.NONE, 0, 0]))
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

    # ---- where the run is --------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """What the run is doing; of one that is being set up to resume, what it did when the checkpoint was saved."""
        return Phase(self.slot[0]) if self.resume_phase is None else self.resume_phase

    @property
    def loop_stage(self) -> RunningStage | None:
        """Training, or which kind of evaluation, is running; ``None`` outside of the loops."""
        return _STAGES[self.slot[0] // 10]

    @property
    def stage(self) -> RunningStage | None:
        """:attr:`loop_stage`; while a run is set up or torn down, the stage that its entry point is for."""
        return _STAGE_OF[self.fn] if self.slot[0] == Phase.SET_UP and self.fn is not None else self.loop_stage

    @property
    def has_trained(self) -> bool:
        """Whether the loop of a fit is running, and not its sanity check."""
        return self.loop_stage in (RunningStage.TRAINING, RunningStage.VALIDATING)

    @property
    def epoch_ending(self) -> bool:
        """Whether the epoch's batches are over and its end hooks are running, or a validation that follows them."""
        return self.end_began or self.phase is Phase.EPOCH_END

    @property
    def between_epochs(self) -> bool:
        """Whether an epoch was closed and the next has not begun."""
        return self.phase in (Phase.BETWEEN_EPOCHS, Phase.TRAIN_END)

    @property
    def validation(self) -> str:
        """The validation inside a fit: "running"; "done", until the batch that it follows is left; else ""."""
        phase = self.phase
        if self.fn is not TrainerFn.FITTING and self.resume_phase is None:
            return ""
        if phase is Phase.VALIDATION_DUE or Phase.VALIDATION_START <= phase < Phase.VALIDATION_END:
            return "running"
        return "done" if phase in (Phase.VALIDATION_END, Phase.VALIDATED) else ""

    @property
    def in_batch(self) -> bool:
        """Whether a training batch is under way: its step, or the hooks before it."""
        return Phase.BATCH_START <= self.phase <= Phase.OPTIMIZER_STEP

    @property
    def epochs_done(self) -> int:
        """Epochs whose batches are over, also the one whose end hooks are running."""
        return self.current_epoch + self.epoch_ending

    @property
    def epoch_cut(self) -> bool:
        """Whether the epoch was, or will be, left before its last batch, by a limit or by a request to stop."""
        return self.cut_batches >= 0

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the run is over, by its end or by an exception."""
        return self.status.stopped

    @property
    def total_batches(self) -> int:
        """Training batches done over all epochs."""
        return self.earlier_batches + self.batches_done

    @property
    def restarting(self) -> bool:
        """Whether the run resumes from a checkpoint and has not trained a batch since."""
        return self.resumed_batches == self.total_batches

    @property
    def logger_step(self) -> int:
        """Index of the last batch on which a step happened, from 0: where values are logged."""
        return max(self.stepped_batches - 1, 0)

    # ---- what moves it -----------------------------------------------------------------------------------------------

    def begin_run(self, fn: TrainerFn) -> None:
        """Forget what an earlier run was in the middle of; what it counted stays."""
        self.fn, self.status, self.slot[0], self.resume_phase = fn, TrainerStatus.RUNNING, Phase.SET_UP, None
        self.batch_idx, self.batches_done, self.eval_batch_idx = -1, 0, -1
        self.is_last_batch = self.should_stop = self.flush_due = self.stepped = self.end_began = False
        if fn is TrainerFn.FITTING:
            self.num_training_batches = 0  # of its own loader, which may be another one
        else:
            self.cut_batches = -1  # the position in the training data is not kept beyond its fit
        self.resumed_batches = -1

    def end_run(self, interrupted: bool = False) -> None:
        """The entry point returns, or raises: then the phase stays what it was."""
        if interrupted:
            self.status = TrainerStatus.INTERRUPTED
        else:
            self.status, self.slot[0] = TrainerStatus.FINISHED, Phase.NONE

    def take_over(self, other: Progress) -> None:
        """Copy everything from ``other``, the progress of the same run in another process."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def show_in(self, words: Any) -> Any:
        """Write :attr:`slot` into other memory from now on; return where it was."""
        before, self.slot = self.slot, words
        return before

    def enter(self, phase: Phase) -> None:
        """Go on to another phase; the loops do it without a call where each batch goes through it."""
        self.slot[0] = phase

    def start_epoch(self) -> None:
        """A training epoch begins with its first batch."""
        self.batch_idx, self.batches_done, self.is_last_batch, self.cut_batches = -1, 0, False, -1
        self.end_began = False
        self.slot[0], self.resume_phase = Phase.EPOCH_START, None

    def resume_at(self, phase: Phase) -> None:
        """The loop resumes at the phase in which the checkpoint was saved, or at ``phase`` where it names none."""
        self.slot[0] = phase if self.resume_phase is None else self.resume_phase
        self.resume_phase = None

    def count_batches_as(self, batches: int) -> None:
        """The samples that were done are ``batches`` batches of this run's loader."""
        self.batches_done, self.batch_idx = batches, batches - 1
        self.resumed_batches = self.total_batches

    def count_epochs_as(self, epochs: int) -> None:
        """So many epochs are done, for the next fit: an earlier generation begins with the last one again."""
        self.current_epoch = epochs

    def expect_batches(self, count: float) -> None:
        """The number of training batches of an epoch is known now, or is another one."""
        self.num_training_batches = count

    def end_epoch(self, cut: bool) -> None:
        """The epoch's batches are over; ``cut``: before its last one."""
        self.cut_batches = self.batches_done if cut else -1
        self.slot[0], self.end_began = Phase.EPOCH_END, True

    def close_epoch(self) -> None:
        """Everything that belongs to the epoch is done."""
        self.current_epoch += 1
        self.earlier_batches += self.batches_done
        self.batches_done, self.slot[0], self.end_began = 0, Phase.BETWEEN_EPOCHS, False

    def count_steps(self, steps: int) -> None:
        """Count optimizer steps."""
        self.global_step += steps

    def ask_to_stop(self, stop: bool = True) -> None:
        """Ask the run to end, or take that back."""
        self.should_stop = stop

    def restore_eval_steps(self, eval_steps: dict[str, list[int]]) -> None:
        """Restore :attr:`eval_steps` after an evaluation that does not count."""
        self.eval_steps = eval_steps

    def begin_evaluation_of(self, batches: float) -> None:
        """A pass over an evaluation loader begins, of ``batches`` batches."""
        self.num_eval_batches, self.eval_batch_idx = batches, -1

    def end_evaluation_of(self, stage: str, dataloader_idx: int) -> None:
        """It is over: its batches count towards the x axis of the next pass."""
        self.eval_steps[stage][dataloader_idx] += self.eval_batch_idx + 1

    def eval_steps_of(self, stage: str, dataloader_idx: int) -> int:
        """Batches that this evaluation loader has given in the stage's earlier passes."""
        counts = self.eval_steps.setdefault(stage, [])
        counts.extend([0] * (dataloader_idx + 1 - len(counts)))
        return counts[dataloader_idx]

    # ---- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters that a checkpoint keeps."""
        state = {name: getattr(self, name) for name in _SAVED}
        state["cut_batches"] = max(self.cut_batches, 0)
        return {**state, "eval_steps": copied(self.eval_steps)}

    def load_state_dict(self, state: dict[str, Any], goes_on: bool = True) -> None:
        """Restore what :meth:`state_dict` returned. ``goes_on``: an epoch that was cut short is to be completed."""
        for name in _COUNTERS:
            if name in state:
                setattr(self, name, state[name])
        self.should_stop = self.should_stop or state.get("should_stop", False)
        self.resume_phase, self.end_began = _resume_phase(state), state.get("epoch_ending", False)
        self.cut_batches = state.get("cut_batches", 0) if state.get("epoch_cut") else -1
        if self.epoch_cut and goes_on:  # by a limit that is another now, or by a request to stop
            if not self.epoch_ending:
                self.current_epoch -= 1
                self.earlier_batches -= self.cut_batches
            self.batches_done, self.cut_batches = self.cut_batches, -1
            self.flush_due = self.stepped = self.end_began = False
            self.resume_phase = Phase.VALIDATED
        self.batch_idx = self.batches_done - 1
        self.resumed_batches = self.total_batches


def copied(eval_steps: dict[str, list[int]]) -> dict[str, list[int]]:
    """A copy of :attr:`Progress.eval_steps` that does not change with it."""
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
