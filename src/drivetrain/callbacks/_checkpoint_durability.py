"""When the files of a ModelCheckpoint are durable, and what waits for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.base import files
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.callbacks._checkpoint_files import is_below, save_new
from drivetrain.callbacks._checkpoint_names import NamedCheckpoint
from drivetrain.checkpoints.io import CheckpointIO, wait_for
from drivetrain.errors import CheckpointError
from drivetrain.trainer.telling import tell

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

_RANKING = (
    "best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "_newest_path",
)  # fmt: skip


@dataclass
class UnderWay:
    """A save of a ModelCheckpoint whose files are not durable yet.

    Attributes:
        files: their paths, each with what is logged when it is durable; a copy of another one has nothing.
        ranking: the attributes that change then.
        replaced: files that are removed then.
        last_before: ``last_model_path`` before this save.
    """

    files: dict[str, str] = field(default_factory=dict)
    ranking: dict[str, Any] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    last_before: str = ""


class StoredCheckpoint(NamedCheckpoint):
    """A callback that ranks and removes checkpoints only once those that take their place are durable.

    A store may return from a save before the file is written (:meth:`CheckpointIO.is_durable`). Then the callback's
    attributes stay as they were, and nothing is removed, until the next save or the end of the run, which waits.

    Attributes:
        best_model_path, best_model_score, best_k_models, kth_best_model_path, kth_value: the ranking.
        last_model_path: the file or link that is replaced with each save.
        verbose: log each save.
    """

    monitor: str | None
    save_top_k: int
    save_on_train_epoch_end: bool | None
    mode: str
    verbose: bool
    save_weights_only: bool
    _replaces: bool  # of the write that is under way: its file may take the place of another
    _refused: bool  # and another run has put a file there meanwhile
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
        self._dropped: list[str] = []  # by the save that is under way: files that others have taken the place of

    @property
    def _save_on_train_epoch_end(self) -> bool | None:  # the name by which libraries read and set it
        return self.save_on_train_epoch_end

    @_save_on_train_epoch_end.setter
    def _save_on_train_epoch_end(self, value: bool | None) -> None:
        self.save_on_train_epoch_end = value

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a checkpoint of the score ``current`` would be among the best; the same on every rank."""
        if current is None or self.save_top_k == 0:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k or self.kth_value is None:
            return True
        better = bool(current < self.kth_value if self.mode == "min" else current > self.kth_value)
        return trainer.strategy.reduce_boolean_decision(better)

    def _ranking(self, scores: dict[str, Tensor]) -> list[str]:
        """Paths, best first. Without ``monitor`` the newest is the best; of equal scores the older is better."""
        if self.monitor is None:
            return list(reversed(scores))
        return sorted(scores, key=lambda path: float(scores[path]), reverse=self.mode == "max")

    def _better(self, score: Tensor, than: Tensor) -> bool:
        return bool(score < than) if self.mode == "min" else bool(score > than)

    def _worst(self) -> list[str]:
        """Return the files that one more makes superfluous, best first."""
        return [] if self.save_top_k == -1 else self._ranking(self.best_k_models)[self.save_top_k - 1 :]

    def _is_among_best(self, score: Tensor) -> bool:
        worst = self._worst()
        return not worst or self._better(score, self.best_k_models[worst[0]])

    def _may_save(self, trainer: Trainer) -> bool:
        return trainer.progress.fn == "fit" and not trainer.fast_dev_run and not trainer.sanity_checking

    # ---- private in name only: libraries override these ----------------------------------------------------------

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        """Whether nothing is saved now, because this is no fit, or its state is saved already."""
        return not self._may_save(trainer) or self._saved_at_step == trainer.progress.global_step

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        """Save a checkpoint that is among the best."""
        self._dropped = self._save_ranked(trainer, current, monitor_candidates)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        """Save a checkpoint that no value ranks."""
        self._dropped = self._save_ranked(trainer, torch.tensor(float(trainer.global_step)), monitor_candidates)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Write one file."""
        if self._replaces:
            trainer.save_checkpoint(filepath, self.save_weights_only)
        else:
            self._refused = not save_new(trainer, filepath, self.save_weights_only)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Remove one file."""
        trainer.strategy.remove_checkpoint(filepath)

    # ---- what waits ----------------------------------------------------------------------------------------------

    def _ranked(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _RANKING}

    def _settle(self, trainer: Trainer) -> None:
        """Wait until the files of the last save are durable; only then rank them, and remove those they replace.

        At once where the store writes before it returns. All ranks come here at the same steps, and nothing is
        exchanged: where rank 0 could not write, it ends the job.

        Raises:
            CheckpointError: a file could not be written; ranking and files are those from before that save.
        """
        if (saved := self._under_way) is None:
            return
        store, failure = trainer.strategy.checkpoint_io, None
        for path in saved.files:
            try:
                wait_for(store, path)
            except CheckpointError as error:
                failure = failure or error  # a copy of a file that was not written fails with it
        self._under_way = None
        if failure is not None:
            self._written_at_step = -1
            if not store.exists(self.last_model_path):
                self.last_model_path = saved.last_before
            raise failure
        vars(self).update(saved.ranking)
        for path in saved.replaced:
            self._remove(trainer, path)
        for message in filter(None, saved.files.values()):
            self._announce(trainer, message)

    def _track(self, trainer: Trainer, path: str, message: str = "") -> bool:
        """Whether the file that was just saved is durable, on all ranks; :meth:`_settle` waits for one that is not."""
        durable: bool = trainer.strategy.broadcast(trainer.strategy.checkpoint_io.is_durable(path))
        if not durable:
            self._under_way = self._under_way or UnderWay()
            self._under_way.files[path] = message
        return durable

    def _announce(self, trainer: Trainer, message: str) -> None:
        if trainer.loggers:
            tell(trainer, "after_save_checkpoint", self)
        if self.verbose:
            rank_zero_info(message)

    def _remove(self, trainer: Trainer, path: str) -> None:
        """Remove a file of its own; when what replaces it is durable."""
        if self._under_way is not None:
            self._under_way.replaced.append(path)
        elif not self._resumed_from(trainer, path) and self._is_own(path, trainer.strategy.checkpoint_io):
            self._remove_checkpoint(trainer, path)

    def _is_own(self, path: str, store: CheckpointIO | None = None) -> bool:
        """Whether this callback may have written ``path``: a checkpoint in its folder, whatever links lead there."""
        resolve = files.resolved if store is None else store.resolve
        return path.endswith(self.FILE_EXTENSION) and is_below(path, self.dirpath, resolve)

    def _resumed_from(self, trainer: Trainer, path: str) -> bool:
        given, resolve = trainer.ckpt_path, trainer.strategy.checkpoint_io.resolve
        return bool(path) and given is not None and resolve(path) == resolve(given)
