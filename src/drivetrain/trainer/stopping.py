"""Saves a checkpoint when a fit is asked to end, finds checkpoints from the end of an epoch, and explains why a fit
ended.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.checkpoints.io import newest_first
from drivetrain.launchers import orphan
from drivetrain.loops.run import Run
from drivetrain.loops.stop import TIME_LIMIT, Stop
from drivetrain.trainer.rank_parts import is_inside

Trainer = Any  # an import would be circular

STOPPED = "stopped.ckpt"


@contextmanager
def stoppable(trainer: Trainer, run: Run) -> Iterator[None]:
    """Context for the loop of a fit. Inside the context, a signal or a time limit ends the fit."""
    trainer._saved_at_stop = []
    save, keep_newest = functools.partial(_save, trainer), functools.partial(_keep_newest, trainer)
    timeout_s = trainer.settings.stop_timeout_s
    with (
        orphan.may_take(timeout_s) if _saves(trainer) or trainer.checkpoint_callbacks else nullcontext(),
        Stop(run, save, timeout_s, keep_newest).listening(),
    ):
        yield


def _saves(trainer: Trainer) -> bool:
    settings = trainer.settings
    return not (settings.enable_checkpointing is False or settings.barebones or settings.fast_dev_run)


def _save(trainer: Trainer, reason: str) -> None:
    """Save the fit's state before the fit ends, and log why the fit ends. Save nothing if the Trainer saves no
    checkpoints, or if a callback saves after the exception that ends the fit. Every rank must call this function.

    Args:
        trainer: the Trainer of the fit.
        reason: why the fit ends.
    """
    path = ""
    savers = reason != TIME_LIMIT and any(each.saves_on_exception for each in trainer.checkpoint_callbacks)
    if _saves(trainer) and not savers:
        path = os.path.join(_folder(trainer), STOPPED)
        try:
            trainer.save_checkpoint(path)
        except Exception as error:
            rank_zero_warn(f"The fit ends by {reason}, and could not save {path}: {error}")
            return
        trainer._saved_at_stop.append(path)
    if path or reason != TIME_LIMIT:  # for a time limit, the Timer has logged the reason
        how = f"To continue: {trainer._resumed_by}, or DRIVETRAIN_RESUME=auto in the environment."
        rank_zero_info(f"The fit ends by {reason}." + (f" Saved {path}. {how}" if path else ""))


def _keep_newest(trainer: Trainer) -> None:
    """Make the checkpoint of :func:`_save` the newest file. Otherwise ``ckpt_path="last"`` would find later checkpoints
    of callbacks.
    """
    if trainer._saved_at_stop and trainer.is_global_zero:
        trainer.strategy.checkpoint_io.touch(trainer._saved_at_stop[-1])


def _folder(trainer: Trainer) -> str:
    found = [folder for callback in trainer.checkpoint_callbacks for folder in callback.save_folders(trainer)]
    return found[0] if found else os.path.join(trainer.default_root_dir, "checkpoints")


def end_of_epoch(trainer: Trainer, refused: str | None, weights: Any) -> str:
    """Describe, for a message, the newest checkpoint of this model that was saved at the end of an epoch.

    Any number of processes can resume from such a checkpoint, even without rank files. The function reads the
    callbacks' checkpoints and the checkpoints in the folder of ``refused``, newest first.

    Args:
        trainer: the Trainer of the fit that cannot resume from ``refused``.
        refused: a checkpoint from the middle of an epoch.
        weights: the weights in ``refused``. The found checkpoint must have weights of the same names.
    """
    store, folder = trainer.strategy.checkpoint_io, os.path.dirname(refused or "") or "."
    saved = {path for callback in trainer.checkpoint_callbacks for path in callback.resume_candidates(trainer)}
    for path in newest_first(store, {*saved, *store.find(folder, "*.ckpt")} - {refused}):
        try:
            found = store.load_checkpoint(path)
            at_end = not is_inside(found) and not found["loops"]["drivetrain"].get("epoch_cut")
            if at_end and "optimizer_states" in found and found["state_dict"].keys() == weights.keys():
                return f"{path}, the newest one that was saved at the end of an epoch"
        except Exception:  # a damaged or foreign file can raise any exception
            continue
    return "a checkpoint that was saved at the end of an epoch"


def why_ended(trainer: Trainer) -> tuple[str, str]:
    """Return two texts for a message: the reason why the fit has ended, and how to continue the training."""
    progress, limits = trainer.progress, trainer.limits
    for name, reached in (("max_steps", progress.global_step), ("max_epochs", progress.current_epoch)):
        if reached >= (limit := getattr(limits, name)):
            return f"{name}={limit:.0f} is reached", f", raise {name}"
    remaining = [each.time_remaining() for each in trainer._callbacks_like("Timer")]
    if any(left is not None and left <= 0 for left in remaining):
        return "its time is over", ", raise the time limit"
    stopped = [each.monitor for each in trainer.early_stopping_callbacks if each.stopped_epoch]
    if stopped:
        return f"EarlyStopping({stopped[0]!r}) stopped it", ", raise its patience"
    return "it was asked to stop" if progress.should_stop else "there is no batch to train on", ""
