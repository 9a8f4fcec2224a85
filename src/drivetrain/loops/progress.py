"""Where a run is: counters and flags, in one plain object that everybody may read."""

from __future__ import annotations

from dataclasses import dataclass
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


class TrainerStatus(str, Enum):
    """How the last entry point is doing."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Progress:
    """The counters of one Trainer. The loops write; callbacks, loggers and the progress bar's thread read.

    Attributes:
        fn, stage, status: what was called, what is running, how it is doing.
        current_epoch: epochs whose last batch is done; while one runs, its index from 0 (trap T49).
        batch_idx: index of the current batch in its epoch, from 0; -1 before the first.
        batches_done: batches of the current epoch whose hooks have all run.
        total_batches: batches done over all epochs.
        global_step: optimizer steps.
        stepped_batches: batches on which a step happened. The loggers' x axis is the index of the last of them,
            ``logger_step`` (trap T11).
        num_training_batches: per epoch; ``inf`` where the loader has no length.
        epoch_ending: the epoch's batches are over and its end hooks are running.
        is_last_batch: the current batch is the last of its epoch.
        should_stop: somebody asked the run to end; honoured once min_epochs and min_steps are reached.
        eval_batch_idx, num_eval_batches: the same for the evaluation that runs now.
        validate_steps, test_steps: evaluation batches so far: the x axis of their per-step values.
    """

    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING
    current_epoch: int = 0
    batch_idx: int = -1
    batches_done: int = 0
    total_batches: int = 0
    global_step: int = 0
    stepped_batches: int = 0
    num_training_batches: float = 0
    epoch_ending: bool = False
    is_last_batch: bool = False
    should_stop: bool = False
    eval_batch_idx: int = -1
    num_eval_batches: float = 0
    validate_steps: int = 0
    test_steps: int = 0

    @property
    def logger_step(self) -> int:
        """Index of the last batch on which a step happened, from 0: where values are logged."""
        return max(self.stepped_batches - 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """The counters that a checkpoint keeps."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        for name in _SAVED:
            setattr(self, name, state[name])


_SAVED = ("current_epoch", "batches_done", "total_batches", "global_step", "stepped_batches", "validate_steps")
