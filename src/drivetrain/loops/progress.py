"""Where a run is: counters and flags, in one plain object that everybody may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class TrainerFn(str, Enum):
    """Which entry point of the Trainer was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(str, Enum):
    """What is running at this moment."""

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


@dataclass(slots=True)
class Progress:
    """The counters of one Trainer. The loops write; callbacks, loggers and the progress bar's thread read.

    Attributes:
        fn, stage, status: what was called, what is running, how it is doing.
        current_epoch: epochs whose last batch is done; while one runs, its index from 0 (trap T49).
        batch_idx: index of the current batch in its epoch, from 0; -1 before the first.
        batches_done: batches of the current epoch whose hooks have all run.
        earlier_batches: batches of all epochs that have ended; ``total_batches`` adds the current one's.
        global_step: optimizer steps.
        stepped_batches: windows done, whether or not their step happened. The loggers' x axis is the index of the last,
            ``logger_step`` (trap T11).
        num_training_batches: per epoch; ``inf`` where the loader has no length.
        held, divisor: batches of the window that is being accumulated, and how many it will have; kept only while
            windows have more than one.
        stepped: the last batch's optimizer step happened.
        flush_due: the last batch's logged values are still to be read.
        validation: "running" or "done", from its start until the batch that it follows is left; else "".
        epoch_cut: the epoch was, or will be, left before its last batch, by a limit or by a request to stop.
        cut_batches: batches of that epoch.
        between_epochs: an epoch has been closed, and the next has not begun.
        epoch_ending: the epoch's batches are over and its end hooks are running.
        is_last_batch: the current batch is the last of its epoch.
        resumed_batches: ``total_batches`` when a checkpoint was taken back; -1 where none was.
        should_stop: somebody asked the run to end; honoured once min_epochs and min_steps are reached.
        eval_batch_idx, num_eval_batches: the same for the evaluation that runs now.
        eval_steps: by stage, the batches of each evaluation loader so far: the x axis of their per-step values.
    """

    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING
    current_epoch: int = 0
    batch_idx: int = -1
    batches_done: int = 0
    earlier_batches: int = 0
    global_step: int = 0
    stepped_batches: int = 0
    num_training_batches: float = 0
    held: int = 0
    divisor: int = 1
    stepped: bool = False
    flush_due: bool = False
    validation: str = ""
    cut_batches: int = 0
    epoch_cut: bool = False
    epoch_ending: bool = False
    between_epochs: bool = False
    is_last_batch: bool = False
    resumed_batches: int = -1
    should_stop: bool = False
    eval_batch_idx: int = -1
    num_eval_batches: float = 0
    eval_steps: dict[str, list[int]] = field(default_factory=dict)

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
        """Whether the run goes on from a checkpoint and has not trained a batch since."""
        return self.resumed_batches == self.total_batches

    @property
    def logger_step(self) -> int:
        """Index of the last batch on which a step happened, from 0: where values are logged."""
        return max(self.stepped_batches - 1, 0)

    def begin_run(self, fn: TrainerFn) -> None:
        """Forget what an earlier run was in the middle of; what it counted stays."""
        self.fn, self.stage, self.status = fn, None, TrainerStatus.RUNNING
        self.batch_idx, self.batches_done, self.eval_batch_idx = -1, 0, -1
        self.is_last_batch = self.should_stop = self.epoch_ending = self.flush_due = self.stepped = False
        self.held, self.divisor, self.validation, self.between_epochs = 0, 1, "", False
        if fn is TrainerFn.FITTING:
            self.num_training_batches = 0  # of its own loader, which may be another one
        else:
            self.epoch_cut = False  # the place in the training data is not kept beyond its fit
        self.resumed_batches = -1
        self.eval_steps = {}

    def eval_steps_of(self, stage: str, dataloader_idx: int) -> int:
        """Batches that this evaluation loader has given in the stage's earlier passes."""
        counts = self.eval_steps.setdefault(stage, [])
        counts.extend([0] * (dataloader_idx + 1 - len(counts)))
        return counts[dataloader_idx]

    def state_dict(self) -> dict[str, Any]:
        """The counters that a checkpoint keeps."""
        state = {name: getattr(self, name) for name in _SAVED}
        return {**state, "eval_steps": {stage: list(counts) for stage, counts in self.eval_steps.items()}}

    def load_state_dict(self, state: dict[str, Any], goes_on: bool = True) -> None:
        """Take back what :meth:`state_dict` returned. ``goes_on``: an epoch that was cut short is to be completed."""
        for name in (*_SAVED, "eval_steps"):
            if name in state:
                setattr(self, name, state[name])
        self.should_stop = self.should_stop or state.get("should_stop", False)
        if self.epoch_cut and goes_on:  # by a limit that is another now, or by a request to stop
            if not self.epoch_ending:
                self.current_epoch -= 1
                self.earlier_batches -= self.cut_batches
            self.batches_done = self.cut_batches
            self.epoch_ending = self.epoch_cut = self.flush_due = self.stepped = False
            self.validation = "done"
        self.batch_idx = self.batches_done - 1
        self.resumed_batches = self.total_batches


_SAVED = (
    "current_epoch",
    "batches_done",
    "earlier_batches",
    "global_step",
    "stepped_batches",
    "is_last_batch",
    "held",
    "divisor",
    "stepped",
    "flush_due",
    "validation",
    "epoch_cut",
    "cut_batches",
    "epoch_ending",
)
