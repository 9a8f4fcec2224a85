"""Messages between ranks that write one checkpoint together, in the background or while training waits.

In the background, threads exchange these messages through the job's store. No collective is needed, so that training
can continue. In a job without a store, the threads use a file beside the checkpoint. Each rank posts one message: the
description of its file, or the reason why the rank could not write its file. Rank 0 collects these messages, writes the
file that completes the checkpoint, and posts the outcome. The other ranks wait for the outcome. If the save fails,
every rank raises an error, at its next save or at the end of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from drivetrain.base import files
from drivetrain.base.restoring import shown_error
from drivetrain.checkpoints.background import AsyncCheckpointIO, Later
from drivetrain.errors import CheckpointError, text_of
from drivetrain.strategies import rank_files
from drivetrain.strategies.group import Group
from drivetrain.strategies.waiting import wait_for_keys

if TYPE_CHECKING:
    from drivetrain.strategies.strategy import Strategy


def begin(
    strategy: Strategy,
    background: AsyncCheckpointIO,
    state: Mapping[str, Any],
    part: Mapping[str, Any],
    path: str | Path,
    storage_options: Any,
    listed: str,
    store: Any,
) -> None:
    """Begin to write ``state`` to ``path``, and each rank's ``part`` to a rank file, in the background. Every rank must
    call this function. ``store`` is the result of :func:`store_for`.

    Raises:
        CheckpointError: this rank cannot begin to save. The other ranks raise an error later, when they wait for the
            checkpoint.
    """
    with background.one_save():
        path, number = strategy.broadcast((path, uuid.uuid4().hex[:8]))
        writers, carried = rank_files.shares(strategy, part)
        joint = JointSave(strategy.world, path, number, store, writers)
        if strategy.is_global_zero:
            entries: list[rank_files.Entry] = []

            def collect() -> list[rank_files.Entry]:
                entries.extend(joint.exchange({}, None))
                return entries

            main = _begun(lambda: strategy.save_checkpoint({**state, listed: Later(collect)}, path, storage_options))
            background.begin(path, _complete, strategy, joint, main or background.written(path), path, entries)
        else:
            file, own = f"{path}.{number}.rank{strategy.global_rank}", None
            if carried:
                content = rank_files.content_of(carried)
                own = _begun(lambda: background.save_checkpoint(content, file, storage_options))
                background.begin(path, _post, joint, own or background.written(file), file, list(carried))
            main = _begun(lambda: strategy.save_checkpoint(state, path, storage_options)) or own
            entry = {"name": os.path.basename(file)} if carried else {}
            background.begin(path, _follow, strategy, joint, path, entry, listed)
        if main is not None:
            raise main


def _begun(begin: Callable[[], None]) -> Exception | None:
    try:
        begin()
    except Exception as error:
        return error
    return None


def _complete(
    strategy: Strategy,
    joint: JointSave,
    main: Exception | Future[Any],
    path: str | Path,
    entries: Sequence[rank_files.Entry],
) -> None:
    """End a save on rank 0, in the writing thread. ``main`` is the result of writing the checkpoint's main file. If the
    main file has replaced an earlier checkpoint, also remove the other ranks' files of that checkpoint.
    """
    failure = main if isinstance(main, Exception) else main.exception()
    if failure is None:
        failure = _begun(lambda: rank_files.commit(strategy, path, entries, {}))
    joint.conclude(failure)


def _post(joint: JointSave, own: Exception | Future[Any], file: str, ranks: Sequence[int]) -> None:
    """Send rank 0 a description of the file that this rank has written. Called in the writing thread."""
    failure, entry = own if isinstance(own, Exception) else own.exception(), dict[str, Any]()
    if not isinstance(own, Exception) and failure is None:
        try:
            entry = own.result() or rank_files.entry_of(file, ranks)
        except OSError as error:
            failure = error
    sums = {key: entry[key] for key in ("size", "crc32") if key in entry}
    joint.exchange({"name": os.path.basename(file), "ranks": list(ranks), **sums}, failure)


def _follow(strategy: Strategy, joint: JointSave, path: str | Path, own: rank_files.Entry, listed: str) -> None:
    """End a save on any rank except rank 0, in the writing thread. ``own`` describes the file of this rank, and is
    empty if this rank has written no file.
    """
    try:
        joint.conclude(None)
    except CheckpointError:
        rank_files.discard(strategy, path, own, listed)
        raise
    rank_files.commit(strategy, path, (), own)


# ---- the messages ----------------------------------------------------------------------------------------------------


def store_for(world: Group, path: str | Path) -> Any:
    """Return the store for a save to ``path``. Every rank must call this function. The result is a new connection to
    the job's store. If the job has no store, the result is a store in a file beside the checkpoint. If some ranks do
    not see this file, the result is ``None``. The last rank that uses the file removes it.
    """
    if world.store is not None:
        return world.store.clone()
    name = world.broadcast(
        None if files.is_remote(path) else files.temporary_beside(files.absolute(files.spelled(path)))
    )
    if name is None:
        return None
    store = None
    with contextlib.suppress(OSError):
        if world.index == 0:
            name.parent.mkdir(parents=True, exist_ok=True)
            name.touch()
    world.barrier()
    if name.is_file():
        with contextlib.suppress(OSError, RuntimeError):  # the file system has no locks
            store = dist.FileStore(str(name), world.size)  # type: ignore[attr-defined]  # a public name
    if not world.reduce_boolean_decision(store is not None):
        store = None
        if world.index == 0:
            name.unlink(missing_ok=True)
    return store


_BRANCHES = 8  # messages pass through a tree of ranks; each rank has up to this many children
_decided: list[str] = []  # the keys of outcomes that are still in the store


class JointSave:
    """Sends and receives one rank's messages about a checkpoint that several ranks write.

    The methods run in the writing thread.

    Args:
        world: all ranks.
        path: the checkpoint, for messages.
        save_id: the name of the save, equal on all ranks and new for every save.
        store: the result of :func:`store_for`. ``None``: there is only one rank, or training waits while the ranks
            exchange messages.
        writers: the ranks that write a file, without rank 0; ``None``: all ranks write a file.
    """

    def __init__(
        self, world: Group, path: str | Path, save_id: str, store: Any, writers: Sequence[int] | None = None
    ) -> None:
        self._world, self._path, self._rank, self._ranks = world, path, world.rank, world.ranks
        self._is_first = world.rank == self._ranks[0]
        self._tree = [*self._ranks[:1], *(self._ranks[1:] if writers is None else writers)]
        self._store, self._key = store, f"drivetrain/save {save_id}"

    def exchange(self, written: Any, failure: BaseException | None) -> list[Any]:
        """Send the other ranks ``written``, a description of this rank's file, or the reason of ``failure``.
        ``written`` is plain data, or consists of objects with plain attributes.

        Returns:
            On rank 0, the other ranks' values of ``written``, in the order of ranks.

        Raises:
            Exception: ``failure``, or a CheckpointError if another rank could not write its file. With a store, only
                rank 0 raises the exception here. The other ranks raise the exception in :meth:`conclude`.
        """
        if self._store is None and len(self._ranks) > 1:
            outcomes = self._world.gather_objects((written, failure and shown_error(failure)))
            found = {str(rank): theirs for rank, (theirs, _) in zip(self._ranks, outcomes, strict=True)}
            texts = [
                f"rank {rank} could not write its file: {text}." for rank, (_, text) in enumerate(outcomes) if text
            ]
            failed = texts[0] if texts else ""
        elif self._is_first and failure is not None:
            raise failure
        else:
            found, failed = self._below()
            if not self._is_first:
                found[str(self._rank)] = written
                if failure is not None:
                    failed = f"rank {self._rank} could not write its file: {_text(failure)}"
                with contextlib.suppress(RuntimeError):  # the job and the job's store have ended
                    self._store.set(self._own(self._rank), json.dumps([found, failed], default=vars))
                return []
        if failed:
            raise failure or CheckpointError(f"The checkpoint {self._path} was not written, because {failed}")
        while self._store is not None and _decided:  # all ranks have read the outcome of the previous save
            self._store.delete_key(_decided.pop())
        return [found[str(rank)] for rank in self._tree[1:]]

    def conclude(self, failure: BaseException | None) -> None:
        """End the save. With a store, rank 0 sends the other ranks the outcome. Without a store, the caller must tell
        the other ranks.

        Raises:
            Exception: ``failure``, if this rank has failed; a CheckpointError, if another rank has failed.
        """
        key, theirs = f"{self._key}/outcome", ""
        if self._store is not None and self._is_first:
            with contextlib.suppress(RuntimeError):  # the job and the job's store have ended
                # the value begins with "-", because some stores treat an empty value as missing
                self._store.set(key, f"-{'' if failure is None else _text(failure)}")
            _decided.append(key)
        elif self._store is not None:
            if reason := wait_for_keys(self._store, [key], self._ranks[:1]):
                theirs = f"The checkpoint {self._path} was not written, because {self._gave_up(reason)}"
            else:
                theirs = self._store.get(key).decode()[1:]
        if failure is not None or theirs:
            raise failure or CheckpointError(theirs)

    def _below(self) -> tuple[dict[str, Any], str]:
        """Return the messages of all ranks below this rank in the tree, by rank. Also return why one of these ranks
        could not write its file, or "".
        """
        first = _BRANCHES * self._tree.index(self._rank) + 1
        ranks = self._tree[first : first + _BRANCHES]
        keys = list(map(self._own, ranks))
        found, failed = dict[str, Any](), ""
        if keys and (reason := wait_for_keys(self._store, keys, ranks)):
            return found, self._gave_up(reason)
        for key in keys:
            theirs, failure = json.loads(self._store.get(key))
            self._store.delete_key(key)
            found, failed = {**found, **theirs}, failed or failure
        return found, failed

    def _gave_up(self, reason: str) -> str:
        return f"rank {self._rank} waited for other ranks: {reason}. The checkpoints before it are unchanged."

    def _own(self, rank: int) -> str:
        return f"{self._key}/{rank}"


def _text(failure: BaseException) -> str:
    """Return a text about ``failure`` for other ranks: the message of a CheckpointError, or a description of any other
    exception.
    """
    return text_of(failure) if isinstance(failure, CheckpointError) else shown_error(failure)
