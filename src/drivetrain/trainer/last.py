"""Finds the checkpoint for ``ckpt_path="last"``: the newest complete checkpoint of this program with this
configuration.

In a folder that the user has chosen, every checkpoint counts as a checkpoint of this program. Such folders are
``dirpath``, ``default_root_dir`` (without a logger), and the folder of a logger's ``version``. If a logger gives each
run its own folder, the folders of all runs are searched. A file in these folders counts if its entry ``program`` is
equal to the program and configuration of this run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain.base import files
from drivetrain.base.configs import as_plain, is_config
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import shown_error
from drivetrain.checkpoints import sharded
from drivetrain.checkpoints.file import entries, reads_files
from drivetrain.checkpoints.io import CheckpointIO, newest_first
from drivetrain.errors import CheckpointError, CheckpointNameError, first_of
from drivetrain.module.loading import raw_hparams
from drivetrain.strategies import rank_files
from drivetrain.trainer import telling
from drivetrain.trainer.other_ranks import saved_by, why_as_many
from drivetrain.trainer.rank_parts import is_inside

Trainer = Any  # an import would be circular

# Command-line arguments that may differ when a fit is resumed: the checkpoint, the length of training, and the rank
# that a launcher passes.
_FREE = re.compile(r"ckpt|checkpoint|resume|rank$|(^|\.)(max_|num_|n_)?(epochs|steps|time)$")
_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_FETCHED = 8  # the maximum number of files to load, if a store can only load complete files

finished_fits = 0
"""The number of fits that have finished in this process. This number distinguishes the folds of a cross-validation."""


def program_of(trainer: Trainer, model: Any, datamodule: Any) -> dict[str, str]:
    """Return digests of a fit's program and configuration, and the fit's number. Digests are used because arguments can
    contain secrets.
    """
    script = os.path.realpath(getattr(sys.modules.get("__main__"), "__file__", None) or ".")
    if not files.is_remote(trainer.default_root_dir):
        with contextlib.suppress(ValueError):  # relpath() raises if the folder is on another drive
            # A relative path stays valid if the user moves the script and the folder together.
            script = os.path.relpath(script, os.path.realpath(trainer.default_root_dir))
    classes = [f"{type(each).__module__}.{type(each).__qualname__}" for each in (model, datamodule)]
    hparams = [_plain(raw_hparams(each)) for each in (model, datamodule) if each is not None]
    configuration = [list(_arguments(sys.argv[1:])), hparams, finished_fits]
    return {"name": _digest([script, classes]), "configuration": _digest(configuration), "fit": str(finished_fits)}


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="replace")).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if is_config(value):
        value = as_plain(value, resolve=False)  # an interpolated value, such as a date, can change
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__qualname__


def _arguments(words: list[str]) -> Iterator[str]:
    """Yield the command-line arguments that belong to the program's configuration."""
    skips = False
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-") or equals:
            is_free = _FREE.search(name.lstrip("-").replace("-", "_")) is not None
            skips = is_free and not equals  # the next word is the value of this option
            if not is_free:
                yield word
        elif not skips and word not in _SUBCOMMANDS:
            yield word
        else:
            skips = False


def resolve_last(trainer: Trainer, fitting: bool, requeued: str | None = None) -> str | None:
    """Return the checkpoint for ``ckpt_path="last"``; ``None``: the fit starts from the beginning.

    Args:
        trainer: the Trainer, whose callbacks propose files.
        fitting: whether a fit resumes; ``validate``, ``test`` and ``predict`` need only the weights.
        requeued: the file that a requeued job has saved for this fit; ``None`` if there is none.

    Raises:
        CheckpointError: no file can be used, and at least one file is damaged, missing, or for another number of
            processes.
        CheckpointNameError: there is no file. A fit with a checkpoint callback starts from the beginning instead.
    """
    callbacks, store = trainer.checkpoint_callbacks, trainer.strategy.checkpoint_io
    found = _Found(trainer, fitting)
    given = {path for callback in callbacks for path in callback.resume_candidates(trainer)}
    given |= {requeued} if requeued else set()
    gone = sorted(path for path in given if not store.exists(path))
    found.broken += [_how_gone(store, path) for path in gone]
    others = _in_folders_of_runs(trainer) - given
    for path in newest_first(store, given.union(others).difference(gone)):
        if (path in given or found.is_own(path, others)) and found.can_be_used(path):
            if found.broken or found.unfinished:
                rank_zero_warn(
                    f'ckpt_path="last" passes over what cannot be resumed from: {found.passed_over}. The newest '
                    f"complete checkpoint is taken: {path}."
                )
            if fitting:
                telling.continue_numbered_runs(trainer, found.entry(path), path)
            return path
    if found.broken:
        raise CheckpointError(
            f'ckpt_path="last" means {found.passed_over}, and there is no complete checkpoint. Pass a path, or remove '
            "what is named here to begin from the start."
        )
    hint = found.hint
    if not (fitting and callbacks):
        why = "its callbacks have saved none so far" if callbacks else "there is no ModelCheckpoint among the callbacks"
        why = f"{found.passed_over}" if found.unfinished else why
        raise CheckpointNameError(f'ckpt_path="last" names no checkpoint: {why}.{hint or " Pass a path."}')
    none = found.passed_over if found.unfinished else "no checkpoint of this program was found for this fit"
    none = "no checkpoint was saved with this configuration" if hint and not found.unfinished else none
    say = rank_zero_warn if found.unfinished or hint else rank_zero_info
    say(f'ckpt_path="last": {none}, so training starts from the beginning.{hint}')
    return None


def newest_of_fit(trainer: Trainer) -> str | None:
    """Return the newest usable checkpoint of the running fit; ``None`` if there is none. The checkpoint from which the
    fit resumed is included. Every rank must call this function, and gets rank 0's result.
    """
    store, found = trainer.strategy.checkpoint_io, _Found(trainer, fitting=True)
    store.wait()
    own = {str(trainer.ckpt_path or "")}
    for callback in trainer.checkpoint_callbacks:
        own |= {getattr(callback, "last_model_path", ""), *getattr(callback, "best_k_models", ())}
    there = {path for path in own if path and store.exists(path)} if trainer.is_global_zero else ()
    paths = newest_first(store, there)
    return trainer.strategy.broadcast(next(filter(found.can_be_used, paths), None))


def _in_folders_of_runs(trainer: Trainer) -> set[str]:
    """Return the files in the folders of this program's runs, and of other runs that were logged to the same folder."""
    callbacks, store = trainer.checkpoint_callbacks, trainer.strategy.checkpoint_io
    folders = {(os.path.join(trainer.default_root_dir, "checkpoints"), ".ckpt")}
    for callback in callbacks:
        extension = getattr(callback, "FILE_EXTENSION", ".ckpt")
        folders.update((folder, extension) for folder in callback.save_folders(trainer))
    found = {path: end for folder, end in folders for path in store.find(folder, f"*{end}*")}  # one request per folder
    return {path for path, end in found.items() if path.endswith((end, rank_files.UNFINISHED))}


class _Found:
    """The files that a search for the newest usable checkpoint has examined.

    Attributes:
        broken: descriptions of complete files that are unusable, for example because they need another number of
            processes.
        unfinished: descriptions of incompletely written files.
        configured: files of this program with another configuration.
    """

    def __init__(self, trainer: Trainer, fitting: bool) -> None:
        self.broken: list[str] = []
        self.unfinished: list[str] = []
        self.configured: list[str] = []
        self._trainer, self._fitting = trainer, fitting
        self._store = trainer.strategy.checkpoint_io
        self._program = trainer._program
        self._entries: dict[str, Mapping[str, Any] | None] = {}
        self._fetched = 0

    @property
    def passed_over(self) -> str:
        return ", ".join([*self.broken, *self.unfinished])

    @property
    def hint(self) -> str:
        """A sentence for messages about this program's checkpoints with another configuration; "" if there are no such
        checkpoints.
        """
        if not self.configured:
            return ""
        return (
            f" There are {first_of(self.configured, 3)}, which were saved with other arguments, "
            "hyperparameters or an earlier version: to resume from one, pass its path."
        )

    def is_own(self, path: str, others: set[str]) -> bool:
        """Whether this program with this configuration has saved ``path``. An unreadable file counts as this program's
        if the program has saved another file in the folder, or if no file there is readable.
        """
        entry = self.entry(path)
        if entry is None:  # the file is unreadable, so the other files in the folder are examined
            folder = os.path.dirname(path)
            beside = [self.entry(other) for other in others if os.path.dirname(other) == folder]
            said = [self._saved_by(each) for each in beside if each is not None]
            return not said or self._program in said
        saved_by = self._saved_by(entry)
        if saved_by == self._program:
            return True
        # The hint does not name files of the program's other fits, for example of other folds of a cross-validation.
        if not saved_by or all(saved_by.get(key) == self._program.get(key) for key in ("name", "fit")):
            self.configured.append(path)
        return False

    def _saved_by(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entry ``program`` of a checkpoint. Earlier versions stored no fit number, so this fit's number is
        added.
        """
        saved_by = entry.get("program")
        return {"fit": self._program.get("fit"), **saved_by} if isinstance(saved_by, Mapping) else {}

    def entry(self, path: str) -> Mapping[str, Any] | None:
        """Return a checkpoint's entries, without reading the tensors if possible; ``None`` for an unreadable file."""
        if path not in self._entries:
            self._entries[path] = None
            is_local = reads_files(self._store) and not files.is_remote(path)
            self._fetched += not is_local
            if is_local or self._fetched <= _FETCHED:
                try:
                    self._entries[path] = entries(path) if is_local else self._store.load_checkpoint(path)
                except Exception:  # a damaged file can raise any exception, which can_be_used reports
                    return None
        return self._entries[path]

    def can_be_used(self, path: str) -> bool:
        """Return whether a run can resume from ``path``. If not, record the reason."""
        trainer, store = self._trainer, self._store
        if path.endswith(rank_files.UNFINISHED):
            lost = rank_files.missing(store, (self.entry(path) or {}).get("rank_files", ()), path)
            self.unfinished.append(f"the save of {path} was not finished" + (f" ({lost} is missing)" if lost else ""))
            return False
        if trainer.strategy.reads_folder(path):
            return True
        is_folder = reads_files(store) and not files.is_remote(path) and os.path.isdir(path)
        if is_folder and not sharded.is_checkpoint(path):
            self.unfinished.append(f"the save of {path} was not finished")
            return False
        try:
            checkpoint = entries(path) if os.path.isdir(path) and reads_files(store) else store.load_checkpoint(path)
        except Exception as error:
            if store.is_complete(path):
                return True  # the file contains pickled objects, which a fit with weights_only=False can load
            self.broken.append(f"{path} cannot be read ({shown_error(error)})")
            return False
        why = _why_not_resumed(trainer, checkpoint, path) if self._fitting else ""
        self.broken += [why] if why else []
        return not why


def _how_gone(store: CheckpointIO, path: str) -> str:
    target = store.link_target(path)
    return f"{path} is gone" if target is None else f"{path}, a link to {target}, which does not exist"


def _why_not_resumed(trainer: Trainer, checkpoint: Mapping[str, Any], path: str) -> str:
    """Return why a fit cannot resume from a readable checkpoint; "" if no reason is known."""
    if "drivetrain_version" in checkpoint and not {"optimizer_states", "loops"} <= checkpoint.keys():
        return f"{path} holds only weights"
    listed, count = checkpoint.get("rank_files", ()), saved_by(checkpoint)
    if not is_inside(checkpoint):
        return ""
    as_many = count == trainer.world_size
    if not as_many and (why := why_as_many(checkpoint, trainer.world_size)):
        now = trainer.world_size
        return f"{path} was saved in the middle of an epoch by {count} processes, and there are {now}: {why}"
    if not (as_many or "window" in checkpoint.get("restart", {})):
        return ""
    lost = rank_files.missing(trainer.strategy.checkpoint_io, listed, path)
    return f"{path} was saved in the middle of an epoch, and without {lost}" if lost else ""
