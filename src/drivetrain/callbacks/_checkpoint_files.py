"""The files of a ModelCheckpoint: which are its own, which is the newest, and how a link to one is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain.base import files
from drivetrain.base.restoring import WrongForm, entry, expect, number
from drivetrain.checkpoints.file import TorchCheckpointIO

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


def save_new(trainer: Trainer, path: str, weights_only: bool = False) -> bool:
    """Save to ``path``, unless another process has put a file there meanwhile; every rank must call it.

    Returns:
        Whether it was saved: the same on every rank.
    """
    store = trainer.strategy.checkpoint_io
    if not isinstance(store, TorchCheckpointIO):  # which alone can tell
        trainer.save_checkpoint(path, weights_only)
        return True
    with store.new_files() as refused:
        trainer.save_checkpoint(path, weights_only)
    saved: bool = trainer.strategy.broadcast(not refused)
    return saved


def is_below(path: str, folder: str | None, resolve: Callable[[str], str] = files.resolved) -> bool:
    """Return whether the file ``path`` lies in ``folder`` or in a folder below, wherever links and ".." lead."""
    if folder is None:
        return False
    own, its_folder = resolve(folder), resolve(os.path.dirname(path) or ".")
    return its_folder == own or its_folder.startswith(os.path.join(own, ""))


def check_state(state: Any) -> None:
    """Refuse what :meth:`ModelCheckpoint.state_dict` cannot have returned.

    Raises:
        CheckpointError: an entry is of another type; the message names it.
    """
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        entry(state, name, str)
    entry(state, "dirpath", (str, type(None)))
    for name in ("best_model_score", "kth_value"):
        if entry(state, name, (Tensor, int, float, type(None))) is not None:
            number(state[name], f"[{name!r}]")
    if expect(state.get("current_score"), (Tensor, int, float, type(None)), "['current_score']") is not None:
        number(state["current_score"], "['current_score']")
    expect(state.get("newest_path", ""), str, "['newest_path']")  # files of earlier versions have none of these
    for name in ("saved_at_step", "awaited_at_step", "last_at_batch"):
        expect(state.get(name, -1), int, f"[{name!r}]")
    for path, score in entry(state, "best_k_models", Mapping).items():
        expect(path, str, "['best_k_models']")
        number(score, f"['best_k_models'][{path!r}]")
        if "\0" in path:
            raise WrongForm("['best_k_models']", f"has the path {path!r}")
