"""Describe a fit at its end: the duration, why the fit ended, the best checkpoint, the logs, and how to resume."""

from __future__ import annotations

import os

from drivetrain.base import files
from drivetrain.callback import Trainer
from drivetrain.callbacks._progress_thread import duration_text
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.trainer.stopping import why_ended


def summary(trainer: Trainer, seconds: float) -> list[str]:
    """Return the lines to log for a fit that has ended without an exception.

    Args:
        trainer: the Trainer of the fit.
        seconds: how long the fit took.
    """
    progress, (why, limit) = trainer.progress, why_ended(trainer)
    epochs, steps = progress.current_epoch, progress.global_step
    counts = f"{epochs} {'epoch' if epochs == 1 else 'epochs'}, {steps} {'step' if steps == 1 else 'steps'}"
    lines = [f"The fit took {duration_text(seconds)} and ended after {counts}: {why}."]
    savers = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint) and each.best_model_path]
    for saver in savers[:1]:
        path, monitor, score = _short(saver.best_model_path), saver.monitor, saver.best_model_score
        lines.append(
            f"Checkpoint: {path}" if monitor is None or score is None else f"Best {monitor}: {score:.4g}, {path}"
        )
    folders = dict.fromkeys(_short(folder) for each in trainer.loggers if (folder := each.log_dir or each.save_dir))
    parts = [f"Logs: {', '.join(folders)}"] if folders else []
    if savers and not savers[0].save_weights_only:
        parts.append(f"To train on{limit}: {trainer._resumed_by}")
    return [*lines, *([". ".join(parts)] if parts else [])]


def _short(path: str) -> str:
    """Return ``path`` relative to the working folder. A path outside this folder is unchanged."""
    inside = not files.is_remote(path) and os.path.abspath(path).startswith(os.path.join(os.getcwd(), ""))
    return os.path.relpath(path) if inside else path
