"""Write the files of a ModelCheckpoint, wait until they are stored, and remove files with worse scores."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.base import files
from drivetrain.base.introspect import reads
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.restoring import Form, WrongForm, expect, number
from drivetrain.callback import Trainer
from drivetrain.callbacks._checkpoint_arguments import acts_at_epoch_end
from drivetrain.callbacks._checkpoint_names import NamedCheckpoint
from drivetrain.checkpoints.io import CheckpointIO, background_of, wait_for
from drivetrain.errors import CheckpointError
from drivetrain.trainer.telling import tell

_RANKING = (
    "best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "_newest_path",
)  # fmt: skip


_SCORE: Form = (Tensor, int, float, None, number)
_STATE: Form = {
    "best_model_path": str, "kth_best_model_path": str, "last_model_path": str, "dirpath": (str, None),
    "best_model_score": _SCORE, "kth_value": _SCORE, "best_k_models": {str: number},
    # optional, because checkpoints of earlier versions do not contain these entries
    "current_score?": _SCORE, "newest_path?": str, "saved_at_step?": int, "awaited_at_step?": int,
    "last_at_batch?": int,
}  # fmt: skip
"""The entries that :meth:`ModelCheckpoint.state_dict` returns, with their types. A ``?`` marks an optional entry."""


def check_state(state: Any) -> None:
    """Raise an error if ``state`` does not have the form that :meth:`ModelCheckpoint.state_dict` returns.

    Raises:
        CheckpointError: an entry has a wrong type; the message names the entry.
    """
    for path in expect(state, _STATE)["best_k_models"]:
        if "\0" in path:
            raise WrongForm("['best_k_models']", f"has the path {path!r}")


def save_new(trainer: Trainer, path: str, weights_only: bool = False) -> bool:
    """Save to ``path``, unless a file of another process already exists there. Every rank must call this function.

    Returns:
        Whether the file was saved. All ranks get the same answer.
    """
    with trainer.strategy.checkpoint_io.new_files() as refused:
        trainer.save_checkpoint(path, weights_only)
    return trainer.strategy.broadcast(not refused)


def is_below(path: str, folder: str | None, resolve: Callable[[str], str] = files.resolved) -> bool:
    """Return whether the file ``path`` is in ``folder`` or below, with links and ".." resolved."""
    if folder is None:
        return False
    own, its_folder = resolve(folder), resolve(os.path.dirname(path) or ".")
    return its_folder == own or its_folder.startswith(os.path.join(own, ""))


@dataclass
class UnderWay:
    """The files of a ModelCheckpoint that the :class:`CheckpointIO` is still writing in the background.

    Attributes:
        files: for each path, the message to log when the file is durable; "" logs nothing.
        ranking: the new values of the callback's attributes, by name; the callback sets them when the files are
            durable.
        replaced: the files to remove when the files are durable.
        last_before: the value of ``last_model_path`` before this save.
    """

    files: dict[str, str] = field(default_factory=dict)
    ranking: dict[str, Any] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    last_before: str = ""


class StoredCheckpoint(NamedCheckpoint):
    """A callback that keeps old checkpoints until the new checkpoints are durable.

    A :class:`CheckpointIO` may still be writing a file when its save method returns (see
    :meth:`CheckpointIO.is_durable`). The callback waits for the file at the next save and at the end of the run. Until
    then, the callback's attributes keep their values, and no file is removed.

    Attributes:
        best_model_path, best_model_score, best_k_models, kth_best_model_path, kth_value: the paths and scores of the
            kept checkpoints.
        last_model_path: the path of ``last.ckpt``, a file or a link that each save replaces.
        verbose: whether to log each save.
    """

    monitor: str | None
    save_top_k: int
    save_on_train_epoch_end: bool | None
    mode: str
    verbose: bool
    save_weights_only: bool
    _replaces: bool
    _refused: bool  # whether the current save found a file of another run at its path
    _save_ranked: Callable[[Trainer, Tensor, dict[str, Any]], list[str]]

    def __init__(self) -> None:
        super().__init__()
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.kth_best_model_path = ""
        self.kth_value: Tensor | None = None
        self.last_model_path = ""
        self._newest_path = ""
        self._under_way: UnderWay | None = None
        self._saved_at_step = self._written_at_step = -1
        self._dropped: list[str] = []  # files to remove after the current save

    # these names are kept because libraries read and set them
    _save_on_train_epoch_end: Any = reads("save_on_train_epoch_end", writable=True)

    @property
    def _last_global_step_saved(self) -> int:
        return max(self._saved_at_step, 0)

    @_last_global_step_saved.setter
    def _last_global_step_saved(self, value: int) -> None:
        self._saved_at_step = value

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a checkpoint with the score ``current`` would be kept. All ranks get the same answer."""
        if current is None or self.save_top_k == 0:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k or self.kth_value is None:
            return True
        return trainer.strategy.reduce_boolean_decision(self._better(current, self.kth_value))

    def _ranking(self, scores: dict[str, Tensor]) -> list[str]:
        """Return the paths of ``scores``, the best first. Without ``monitor``, the newest checkpoint is the best. If
        scores are equal, the older checkpoint comes first.
        """
        if self.monitor is None:
            return list(reversed(scores))
        return sorted(scores, key=lambda path: float(scores[path]), reverse=self.mode == "max")

    def _better(self, score: Tensor, than: Tensor) -> bool:
        return bool(score < than) if self.mode == "min" else bool(score > than)

    def _worst(self) -> list[str]:
        """Return the checkpoints to remove when a new checkpoint is kept, ordered from best to worst."""
        return [] if self.save_top_k == -1 else self._ranking(self.best_k_models)[self.save_top_k - 1 :]

    def _is_among_best(self, score: Tensor) -> bool:
        worst = self._worst()
        return not worst or self._better(score, self.best_k_models[worst[0]])

    def _may_save(self, trainer: Trainer) -> bool:
        return trainer.progress.fn == "fit" and not trainer.fast_dev_run and not trainer.sanity_checking

    # ---- private names that libraries override -------------------------------------------------------------------

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return not self._may_save(trainer) or self._saved_at_step == trainer.progress.global_step

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        return acts_at_epoch_end(self.save_on_train_epoch_end, trainer)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        """Save a checkpoint with the score ``current``, which is among the best."""
        self._dropped = self._save_ranked(trainer, current, monitor_candidates)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        """Save a checkpoint without ``monitor``: the score is the number of optimizer steps."""
        self._dropped = self._save_ranked(trainer, torch.tensor(float(trainer.global_step)), monitor_candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self._replaces:
            trainer.save_checkpoint(filepath, self.save_weights_only)
        else:
            self._refused = not save_new(trainer, filepath, self.save_weights_only)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        trainer.strategy.remove_checkpoint(filepath)

    def _alone(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return a context manager for a save. Until the files of this save are written, other runs that save into this
        folder in the background wait.
        """
        background = background_of(trainer.strategy.checkpoint_io)
        if background is None or self.dirpath is None or files.is_remote(self.dirpath) or not trainer.is_global_zero:
            return nullcontext()
        return background.alone_in(self.dirpath)

    # ---- waiting ---------------------------------------------------------------------------------------------

    def _ranked(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _RANKING}

    def _settle(self, trainer: Trainer) -> None:
        """Wait until the files of the last save are durable. Then set the attributes, and remove the replaced files.

        All ranks call this method after the same steps. The ranks do not communicate. If rank 0 could not write, the
        error on rank 0 ends the whole job.

        Raises:
            CheckpointError: a file could not be written. The callback's attributes then keep their values, and no file
                is removed.
        """
        if (saved := self._under_way) is None:
            return
        store, failure = trainer.strategy.checkpoint_io, None
        with trainer.progress.storing():
            for path in saved.files:
                try:
                    wait_for(store, path)
                except CheckpointError as error:
                    failure = failure or error  # if a file cannot be written, its copies fail too
        self._under_way = None
        if failure is not None:
            self._written_at_step = -1
            if not store.exists(self.last_model_path):
                self.last_model_path = saved.last_before
            raise failure
        vars(self).update(saved.ranking)
        for path in saved.replaced:
            self._remove(trainer, path)
        for path, message in saved.files.items():
            if message:
                self._announce(trainer, path, message)

    def _track(self, trainer: Trainer, path: str, message: str = "") -> bool:
        """Return whether the file is durable already. If the :class:`CheckpointIO` is still writing it, :meth:`_settle`
        waits for it later. All ranks get the same answer.
        """
        durable: bool = trainer.strategy.broadcast(trainer.strategy.checkpoint_io.is_durable(path))
        if not durable:
            self._under_way = self._under_way or UnderWay()
            self._under_way.files[path] = message
        return durable

    def _announce(self, trainer: Trainer, path: str, message: str) -> None:
        trainer.hooks.notify("checkpoint_saved", path, self._written_at_step)
        if trainer.loggers:
            tell(trainer, "after_save_checkpoint", self)
        if self.verbose:
            rank_zero_info(message)

    def _remove(self, trainer: Trainer, path: str) -> None:
        """Remove a checkpoint of this callback. While the :class:`CheckpointIO` is writing other files, leave the
        removal to :meth:`_settle`.
        """
        if self._under_way is not None:
            self._under_way.replaced.append(path)
        elif not self._resumed_from(trainer, path) and self._is_own(path, trainer.strategy.checkpoint_io):
            self._remove_checkpoint(trainer, path)

    def _is_own(self, path: str, store: CheckpointIO | None = None) -> bool:
        """Return whether ``path``, with links resolved, is a checkpoint in this callback's folder."""
        resolve = files.resolved if store is None else store.resolve
        return path.endswith(self.FILE_EXTENSION) and is_below(path, self.dirpath, resolve)

    def _resumed_from(self, trainer: Trainer, path: str) -> bool:
        given, resolve = trainer.ckpt_path, trainer.strategy.checkpoint_io.resolve
        return bool(path) and given is not None and resolve(path) == resolve(given)
