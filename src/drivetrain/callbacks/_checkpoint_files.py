"""Checks of ModelCheckpoint's files and of its state, and a save that does not overwrite another run's file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from drivetrain.base import files
from drivetrain.base.restoring import Form, WrongForm, expect, number
from drivetrain.callback import Trainer


def save_new(trainer: Trainer, path: str, weights_only: bool = False) -> bool:
    """Save to ``path``, unless another process has put a file there in the meantime; every rank must call this
    function.

    Returns:
        Whether the file was saved; the same on every rank.
    """
    with trainer.strategy.checkpoint_io.new_files() as refused:
        trainer.save_checkpoint(path, weights_only)
    return trainer.strategy.broadcast(not refused)


def is_below(path: str, folder: str | None, resolve: Callable[[str], str] = files.resolved) -> bool:
    """Return whether the file ``path`` is in ``folder`` or below, after resolving links and ".."."""
    if folder is None:
        return False
    own, its_folder = resolve(folder), resolve(os.path.dirname(path) or ".")
    return its_folder == own or its_folder.startswith(os.path.join(own, ""))


_SCORE: Form = (Tensor, int, float, None, number)
_STATE: Form = {
    "best_model_path": str, "kth_best_model_path": str, "last_model_path": str, "dirpath": (str, None),
    "best_model_score": _SCORE, "kth_value": _SCORE, "best_k_models": {str: number},
    # files of earlier versions lack these entries
    "current_score?": _SCORE, "newest_path?": str, "saved_at_step?": int, "awaited_at_step?": int,
    "last_at_batch?": int,
}  # fmt: skip
"""What :meth:`ModelCheckpoint.state_dict` returns."""


def check_state(state: Any) -> None:
    """Raise an error for a state that :meth:`ModelCheckpoint.state_dict` cannot have returned.

    Raises:
        CheckpointError: an entry has another type; the message names it.
    """
    for path in expect(state, _STATE)["best_k_models"]:
        if "\0" in path:
            raise WrongForm("['best_k_models']", f"has the path {path!r}")
