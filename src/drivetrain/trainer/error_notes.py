"""Where in a run an exception came: a note that Python prints below its traceback."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from types import FrameType

import torch

from drivetrain.base.rank_zero import log
from drivetrain.base.registry import load
from drivetrain.errors import DrivetrainError, did_you_mean
from drivetrain.loops.progress import Phase, Progress, RunningStage

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (_OURS, os.path.dirname(torch.__file__), os.path.dirname(os.__file__))
_PACKAGES = ("site-packages", "dist-packages")  # below Python's own folder, and not part of it


def note_place(error: BaseException, progress: Progress, rank: int) -> None:
    """Add to ``error`` in which hook, batch and epoch, and on which rank it came.

    Errors of drivetrain's own get none: their text says what to do. Python 3.10 cannot print notes; there it is logged.
    """
    if not isinstance(error, Exception) or isinstance(error, DrivetrainError):
        return
    hook = _hook_of(error) or _PARTS.get(progress.phase, "")
    note = f"{f'in {hook}, ' if hook else ''}{_place(progress, fetching=not hook)}, on rank {rank}."
    for text in (_cure_of_log(error), _cure_of_backward(error, progress), note[0].upper() + note[1:]):
        if not text:
            continue
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            log.error("%s: %s", type(error).__name__, text)


_WRONG_LOG = re.compile(
    r"(?:LightningModule|Callback)\.(log|log_dict)\(\) (?:missing .*'value'|got an unexpected keyword argument '(\w+)')"
)


def _cure_of_log(error: Exception) -> str:
    """Return what to write instead of a call of ``self.log`` that Python refuses; "" for another error.

    The cure is found here, and not by ``log`` itself, so that a right call costs nothing more.
    """
    found = _WRONG_LOG.match(str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return ""
    method, keyword = found.groups()
    if keyword is None:
        return "self.log takes a name and a value. Write self.log_dict(...) for a dictionary of names and values."
    module = load("drivetrain.module.module:LightningModule")  # in this way, because that module knows the Trainer
    arguments = list(inspect.signature(getattr(module, method)).parameters)[1:]
    return f"self.{method} has no argument {keyword!r}. {did_you_mean(keyword, arguments)}"


def _cure_of_backward(error: Exception, progress: Progress) -> str:
    """Return what to write where the graph of the loss is gone before the Trainer's backward pass; "" elsewhere."""
    if progress.phase is not Phase.BACKWARD or "backward through the graph a second time" not in str(error):
        return ""
    return (
        "With automatic optimization the Trainer calls backward() on the loss that training_step returns: the step "
        "must not call it, and the loss must not depend on tensors of an earlier step. Detach these, or set "
        "self.automatic_optimization = False in __init__ and step by hand."
    )


def _hook_of(error: Exception) -> str:
    """The outermost function of the user's that the run has called; "" if there is none."""
    entered = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        entered = entered or path.startswith(_OURS)
        if entered and not _is_library(path):
            return _name_of(frame)
    return ""


def _is_library(path: str) -> bool:
    found = next((each for each in _NOT_THE_USERS if path.startswith(each + os.sep)), None)
    if found is None:
        return path.startswith("<frozen ")
    return found != _NOT_THE_USERS[-1] or not any(f"{os.sep}{each}{os.sep}" in path for each in _PACKAGES)


def _name_of(frame: FrameType) -> str:
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    return name if owner is None else f"{type(owner).__name__}.{name}"


def _place(progress: Progress, fetching: bool) -> str:
    """The phase in words. ``fetching``: where the loop has asked for a batch, the loader is at work, and no hook."""
    phase, stage, epoch, batch = progress.phase, progress.stage, progress.current_epoch, progress.batch_idx
    if stage is None:
        return f"while {progress.fn.value if progress.fn else 'the run'} was being set up"
    if stage is RunningStage.TRAINING:
        if phase is Phase.FETCH:
            return f"{_before_or_after(batch, fetching)} of epoch {epoch}"
        if Phase.BATCH_START <= phase <= Phase.VALIDATED:
            return f"batch {batch} of epoch {epoch}"
        return {
            Phase.TRAIN_START: "at the start of training",
            Phase.TRAIN_END: "at the end of training",
            Phase.EPOCH_START: f"at the start of epoch {epoch}",
            Phase.BETWEEN_EPOCHS: f"after epoch {epoch - 1}",
        }.get(phase, f"at the end of epoch {epoch}")
    name, done = _EVALUATIONS[stage], progress.eval_batch_idx
    within = f" in epoch {epoch}" if progress.fn == "fit" and stage is RunningStage.VALIDATING else ""
    return {
        0: f"at the start of {name}{within}",
        1: f"{_before_or_after(done, fetching)} of {name}{within}",
        2: f"batch {done} of {name}{within}",
        3: f"at the end of {name}{within}",
    }[phase % 10]


def _before_or_after(batch: int, fetching: bool) -> str:
    if batch < 0:
        return "while fetching the first batch" if fetching else "before the first batch"
    return f"while fetching a batch after batch {batch}" if fetching else f"after batch {batch}"


_PARTS = {
    Phase.BACKWARD: "the backward pass",
    Phase.OPTIMIZER_STEP: "the optimizer step",
    Phase.LOG_FLUSH: "logging",
}
_EVALUATIONS = {
    RunningStage.SANITY_CHECKING: "the sanity check",
    RunningStage.VALIDATING: "the validation",
    RunningStage.TESTING: "the test",
    RunningStage.PREDICTING: "the prediction",
}
