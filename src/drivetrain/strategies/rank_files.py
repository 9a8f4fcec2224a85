"""The files that ranks write beside a checkpoint: their names, checksums and removal.

A rank's part is the state that exists only on this rank, such as gradients between two batches of one optimizer step.
Rank 0's part is in the main file, which is the checkpoint itself. All other parts are in rank files,
``model.ckpt.<id>.rank<r>``. On each machine, one rank other than rank 0 writes a rank file. The file contains the parts
of all ranks of this machine, except rank 0. If a part is large, every rank except rank 0 writes its own rank file. The
main file lists the rank files with their sizes and checksums, and is written last. Each save uses a new id. The rank
files of earlier saves are removed after the new main file has become durable. A crash therefore leaves either the old
main file with its rank files, or the new main file with the new rank files. A link to a checkpoint has no rank files of
its own. The rank files are beside the target of the link.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.base.restoring import WrongForm, count, entry, expect, shown_error
from drivetrain.checkpoints.file import entries as entries_of
from drivetrain.checkpoints.file import reads_files
from drivetrain.checkpoints.io import CheckpointIO, background_of, reading, wait_for
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.strategies.strategy import Strategy

with on_first_use:
    from drivetrain.strategies import joint_save

_SUFFIX = r"\.([0-9a-f]{8})\.rank[1-9][0-9]*"

LISTED = "rank_files"  # the key of the list of rank files in the main file
UNFINISHED = ".incomplete"  # the suffix of a checkpoint that lacks a rank's part

_PARTS = "parts_of_ranks"  # in a rank file with the parts of several ranks, the key of these parts
_LARGE = 2**20  # in bytes: if the tensors of a part are larger, each rank writes its own file

Entry = dict[str, Any]
"""The entry of a rank file in the main file. ``name`` is the name of the rank file. ``ranks`` are the ranks whose parts
the rank file contains. Entries of earlier versions have no ``ranks``. For a local file, the entry also has ``size`` in
bytes and ``crc32``.
"""


def save(
    strategy: Strategy,
    state: Mapping[str, Any],
    part: Mapping[str, Any] | None,
    path: str | Path,
    storage_options: Any = None,
    *,
    waits: bool = True,
    listed: str = LISTED,
) -> None:
    """Write ``state`` to ``path``, and each rank's ``part`` to a file beside ``path``. Every rank must call this
    function.

    Args:
        strategy: the strategy that writes.
        state: the checkpoint of this rank. Only rank 0 writes its ``state``, after all parts.
        part: the state that exists only on this rank; ``None`` on all ranks if there is no such state.
        path: the path of the main file.
        storage_options: options for the checkpoint store.
        waits: wait until the checkpoint is durable. If False, the save may still be running when this function returns.
        listed: the key in the main file for the list of rank files.

    Raises:
        CheckpointError: a rank could not write its file. Every rank raises this error, and the previous files are
            unchanged.
    """
    failure, own, entries = None, Entry(), list[Entry]()
    has_parts = strategy.world_size > 1 and part is not None
    if has_parts and part is not None:
        background = background_of(strategy.checkpoint_io)
        if background is not None and (agreed := joint_save.store_for(strategy.world, path)) is not None:
            joint_save.begin(strategy, background, state, part, path, storage_options, listed, agreed)
            if waits:
                wait_for(background, path)
            return
        path, own, entries = write(strategy, part, path, storage_options)
        state = {**state, listed: entries} if entries else state
    store = strategy.checkpoint_io
    try:
        strategy.save_checkpoint(state, path, storage_options)
        if has_parts or waits:
            wait_for(store, path)
    except Exception as error:
        failure = error
    refused = store.was_refused(path)
    outcome = failure and shown_error(failure), refused, store.is_durable(path)
    outcomes = strategy.world.gather_objects(outcome)  # this call waits for every rank
    different = set(outcomes)
    if all((text, refused) == (None, False) for text, refused, _ in different):
        # if a file is not durable yet, a later save to this path removes the replaced rank files
        if all(is_durable for *_, is_durable in different):
            commit(strategy, path, entries, own)
        return
    taken = any(refused for _, refused, _ in different)  # another program has written a file to this path
    discard(strategy, path, own, None if taken else listed)
    if failure is not None:
        raise failure
    for rank, (text, *_) in enumerate(outcomes):
        if text:
            raise CheckpointError(f"The checkpoint {path} was not written, because rank {rank} failed: {text}.")


def write(
    strategy: Strategy, part: Mapping[str, Any], path: str | Path, storage_options: Any = None
) -> tuple[str | Path, Entry, list[Entry]]:
    """Write the parts to files beside the checkpoint. Rank 0 writes the checkpoint itself later. Every rank must call
    this function.

    Args:
        strategy: the ``checkpoint_io`` of this strategy writes the files.
        part: plain data and tensors of this rank; rank 0's part is not written.
        path: the path of the checkpoint.
        storage_options: as for the checkpoint.

    Returns:
        Three values. First, rank 0's ``path``. Second, the entry of the file that this rank has written, or an empty
            entry. Third, on rank 0, the entries of all files; the main file must list these entries.

    Raises:
        CheckpointError: a rank could not write its file. Every rank raises this error.
    """
    path, number = strategy.broadcast((path, uuid.uuid4().hex[:8]))
    own: Entry = {}
    failure: Exception | None = None
    writers, carried = shares(strategy, part)
    if carried:
        file = f"{path}.{number}.rank{strategy.global_rank}"
        try:
            strategy.checkpoint_io.save_checkpoint(content_of(carried), file, storage_options)
            wait_for(strategy.checkpoint_io, file)  # this file must be durable before the main file lists it
            own = entry_of(file, carried)
        except Exception as error:
            failure = error
    outcomes = strategy.world.gather_objects(failure and shown_error(failure))
    failed = [f"rank {rank} could not write its file: {text}" for rank, text in enumerate(outcomes) if text]
    if failed:
        discard(strategy, path, own)
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        raise CheckpointError(f"The checkpoint {path} was not written, because {failed[0]}.") from failure
    return path, own, _collected(strategy, path, number, own, writers)


def _collected(strategy: Strategy, path: str | Path, number: str, own: Entry, writers: Sequence[int]) -> list[Entry]:
    """Return on rank 0 the entries of all files."""
    world, store = strategy.world, strategy.world.store
    if store is None:  # for example in the launching process, after the job
        return [entry for entry in world.gather_objects(own) if entry]
    if strategy.global_rank not in (0, *writers):
        return []
    joint = joint_save.JointSave(world, path, f"{number}, files", store.clone(), writers)
    return [entry for entry in joint.exchange(own, None) if entry]


def shares(strategy: Strategy, part: Mapping[str, Any]) -> tuple[list[int], dict[int, Mapping[str, Any]]]:
    """Return the ranks that write a rank file, and the parts that this rank writes, by rank. Every rank must call this
    function.

    Usually one rank writes the parts of all ranks of its machine. If a part is large, or if the ranks cannot exchange
    parts in host memory, every rank writes its own part.
    """
    rank, count = strategy.global_rank, strategy.world_size
    alone = list(range(1, count)), {rank: part} if rank else {}
    world, here = strategy._plain_world, len(strategy.parallel_devices)
    if count == 2 or not world.can_divide_on_host:
        return alone
    fits = here > 1 and count % here == 0 and rank % here == strategy.local_rank and _bytes_of(part) <= _LARGE
    if set(world.gather_objects((here, fits))) != {(here, True)}:
        return alone
    first = rank - strategy.local_rank
    if world.machine is None:
        world.machine = world if here == count else world.new(range(first, first + here))
    parts = zip(world.machine.ranks, world.machine.gather_objects(part), strict=True)
    writers = [max(1, each) for each in range(0, count, here)]
    return writers, {each: theirs for each, theirs in parts if each and rank in writers}


def _bytes_of(part: Any) -> int:
    """Return the size of all tensors in ``part``, in bytes. A list that begins with a number, such as a random state,
    is skipped.
    """
    if isinstance(part, Tensor):
        return part.nbytes
    below = part.values() if isinstance(part, Mapping) else part if isinstance(part, (list, tuple)) else ()
    return 0 if isinstance(next(iter(below), 0), (int, float)) else sum(map(_bytes_of, below))


def content_of(carried: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the content of a rank file with these parts."""
    if len(carried) == 1:
        return next(iter(carried.values()))
    return {_PARTS: {str(rank): part for rank, part in carried.items()}}


def saved_by(listed: Sequence[Any]) -> int:
    """Return the number of ranks that have saved the checkpoint. ``listed`` is the list of rank files in the
    main file.
    """
    return 1 + sum(len(_ranks_of(each, 0)) for each in listed)


def _ranks_of(listed: Any, at: int) -> Sequence[int]:
    """Return the ranks whose parts a rank file contains. A file of an earlier version contains only the part of rank
    ``at``.
    """
    ranks = listed.get("ranks") if isinstance(listed, Mapping) else None
    return ranks if isinstance(ranks, list) else [at]


def commit(strategy: Strategy, path: str | Path, entries: Sequence[Entry], own: Entry) -> None:
    """Remove the rank files of earlier saves to ``path``. Called after the main file, which lists ``entries``, has
    become durable.

    On rank 0, ``entries`` describes all rank files. ``own`` describes this rank's file.

    Rank 0 removes all earlier files that are visible to rank 0. The other ranks begin their next save only after this
    removal, so rank 0 cannot remove a new file. Each other rank removes its own previous file, because rank 0 does not
    see files on another machine's disk or in a remote store.
    """
    if strategy.is_global_zero:
        remove_others(strategy.checkpoint_io, path, {each["name"] for each in entries})
        return
    earlier = strategy._rank_files_written.pop(str(path), None)
    if own:
        strategy._rank_files_written[str(path)] = own["name"]
    if earlier is not None:
        strategy.checkpoint_io.remove_checkpoint(_beside(path, earlier))


def discard(strategy: Strategy, path: str | Path, own: Entry, listed: str | None = None) -> None:
    """After a failed save, remove the file ``own`` that this rank has written. If the list ``listed`` in the main file
    names ``own``, keep the file.
    """
    if own and (listed is None or not is_listed(strategy.checkpoint_io, path, own, listed)):
        with contextlib.suppress(Exception):  # another error is being raised
            strategy.checkpoint_io.remove_checkpoint(_beside(path, own["name"]))


def is_listed(store: CheckpointIO, path: str | Path, own: Entry, listed: str) -> bool:
    """Return whether the main file at ``path`` lists ``own``, the file of this rank, although the save has failed.

    A save can fail after the main file was renamed, for example while the folder is synced. If the main file cannot be
    read, the result is True.
    """
    try:
        if not store.exists(path):
            return False
        is_mapped = reads_files(store) and _is_local(path)  # a memory map avoids reading the tensors
        main = entries_of(path) if is_mapped else store.load_checkpoint(path)
        return any(each["name"] == own["name"] for each in main.get(listed, ()))
    except Exception:
        return True


def remove(strategy: Strategy, path: str | Path) -> None:
    """Remove the rank files of the checkpoint ``path``.

    Rank 0 removes all rank files that are visible to it. Any other rank removes only its own file. If the checkpoint
    store cannot list files, rank files from other jobs are not removed.
    """
    commit(strategy, path, [], {})


def copy(store: CheckpointIO, source: str, path: str, link: bool = False, replaces: bool = True) -> bool:
    """Copy the checkpoint ``source`` and its rank files to ``path``, or make ``path`` a link: see
    :meth:`CheckpointIO.copy`.
    """
    if not store.is_durable(source):
        if (background := background_of(store)) is None:  # no rank files, because a save with rank files waits
            return store.copy(source, path, link=link, replaces=replaces)
        return background.copy_later(functools.partial(copy, background.checkpoint_io), source, path, link, replaces)
    origin = store.resolve(source)
    copies = {
        file: f"{path}{os.path.basename(file)[len(os.path.basename(origin)) :]}" for file in _found(store, origin)
    }
    if link:
        made = store.copy(source, path, link=True, replaces=replaces)
        if not made or store.link_target(path) is not None:  # a link uses the rank files of the target
            copies = {}
    for file, copied in copies.items():
        store.copy(file, copied)
    if not link:  # the main file is copied last, as in a save
        made = store.copy(source, path, replaces=replaces)
    if made:
        remove_others(store, path, {os.path.basename(copied) for copied in copies.values()})
    return made


def remove_others(store: CheckpointIO, path: str | Path, kept: Collection[str] = ()) -> None:
    """Remove the rank files of the checkpoint ``path``, except those named in ``kept``."""
    for file in _found(store, path):
        if os.path.basename(file) not in kept:
            store.remove_checkpoint(file)


def unfinished(path: str, save_id: str) -> str:
    """Return the temporary path of the checkpoint ``path``. If ranks save without communication, the checkpoint is at
    this path until all ranks have written their parts.
    """
    return f"{path}.{save_id}{UNFINISHED}"


def find_unfinished(store: CheckpointIO, path: str) -> list[str]:
    """Return the unfinished checkpoints of saves to ``path``."""
    folder, name = os.path.split(path)
    return store.find(folder, f"{glob.escape(name)}.*{UNFINISHED}")


def remove_unfinished(store: CheckpointIO, path: str, kept: str) -> None:
    """Remove the unfinished checkpoints of earlier saves to ``path``, except ``kept``."""
    for begun in find_unfinished(store, path):
        if begun != kept:
            shutil.rmtree(begun) if os.path.isdir(begun) else store.remove_checkpoint(begun)


def finish(store: CheckpointIO, begun: str, path: str) -> None:
    """Rename ``begun`` to ``path``."""
    if os.path.isfile(begun):
        files.move(Path(begun), Path(path))
        files.sync_directory(Path(path).parent)
    else:  # the store has not written a local file
        store.copy(begun, path)
        store.remove_checkpoint(begun)


def missing(store: CheckpointIO, entries: Sequence[Entry], path: str) -> str:
    """Return the first missing rank file of the checkpoint ``path``, or "" if no rank file is missing."""
    return next((file for each in entries if not store.exists(file := place_of(each["name"], path))), "")


def place_of(name: str, path: str | Path) -> str:
    """Return the path of the rank file ``name``. ``path`` is the checkpoint, or a link to the checkpoint."""
    if os.path.basename(name) != name or (suffix := re.search(f"{_SUFFIX}$", name)) is None:
        raise WrongForm("['name']", f"is {name!r}, which names no rank file")
    main = os.path.realpath(os.path.expanduser(path)) if _is_local(path) else str(path)
    renamed = f"{main}{suffix[0]}"  # the user may have renamed the checkpoint and the rank files
    return _beside(main, name) if _is_local(path) and not os.path.exists(renamed) else renamed


def read(
    strategy: Strategy, listed: Sequence[Any], rank: int, path: str | Path, weights_only: bool | None
) -> dict[str, Any]:
    """Return the part of ``rank`` from its rank file.

    Args:
        strategy: the ``checkpoint_io`` of this strategy reads the files.
        listed: the main file's list of rank files. A checkpoint of an earlier version lists one file for each rank
            except rank 0, in order.
        rank: any rank except rank 0.
        path: the path of the main file, or of a link to the main file.
        weights_only: as in ``CheckpointIO.load_checkpoint``.

    Raises:
        CheckpointError: the rank file is missing, or has changed since the save. The message names the rank file.
    """
    own = next((each for at, each in enumerate(listed, 1) if rank in _ranks_of(each, at)), None)
    file = checked(expect(own, Mapping), path)
    found = expect(strategy.checkpoint_io.load_checkpoint(file, **reading(weights_only)), Mapping)
    return entry(entry(found, _PARTS, Mapping), str(rank), Mapping) if _PARTS in found else found


def checked(listed: Entry, path: str | Path) -> str:
    """Compare a rank file of the checkpoint ``path`` with the entry in the main file. Return the path of the rank file.

    Raises:
        CheckpointError: the rank file is missing, or has changed since the save. The message names the rank file.
    """
    file = place_of(entry(listed, "name", str), path)
    if not _is_local(path):
        return file
    if not os.path.exists(file):
        raise CheckpointError(f"{file} is missing")
    if "crc32" in listed:  # if a remote store has written the file, the entry has neither size nor crc32
        size, checksum = files.measured(file)
        if size != entry(listed, "size", count):
            raise CheckpointError(f"{file} has {size} bytes, and {listed['size']} were written")
        if checksum != listed["crc32"]:
            raise CheckpointError(f"{file} is damaged: its checksum is wrong")
    return file


def of_other_ranks(strategy: Strategy, saved_by: int) -> str:
    """Return the warning for a checkpoint that ``saved_by`` processes have saved, a different number than now. The
    ranks' parts cannot be restored.
    """
    return (
        f"The checkpoint was saved by {saved_by} processes, and there are {strategy.world_size}: what "
        f"{type(strategy).__name__} has kept for each of them (rank_state) is left out."
    )


def entry_of(file: str, ranks: Iterable[int]) -> Entry:
    """Return the main file's entry for the rank file ``file`` with the parts of ``ranks``. The checksum is computed
    from the file.
    """
    own: Entry = {"name": os.path.basename(file), "ranks": list(ranks)}
    if os.path.isfile(local := os.path.expanduser(file)):
        own["size"], own["crc32"] = files.measured(local)
    return own


def _is_local(path: str | Path) -> bool:
    return os.path.lexists(os.path.expanduser(path))


def _beside(path: str | Path, name: str) -> str:
    text = os.fspath(path)
    return text[: len(text) - len(os.path.basename(text))] + name


def files_of(store: CheckpointIO, path: str | Path) -> list[str]:
    """Return the checkpoint ``path`` and all its rank files that are visible on this machine."""
    return [str(path), *_found(store, path)]


def _found(store: CheckpointIO, path: str | Path) -> list[str]:
    """Return the rank files of ``path`` in the store."""
    folder, base = os.path.split(os.path.expanduser(path))
    ours = re.compile(re.escape(base) + _SUFFIX)
    return [
        file
        for file in store.find(folder or ".", f"{glob.escape(base)}.*.rank*")
        if ours.fullmatch(os.path.basename(file))
    ]
