"""``drivetrain checkpoint prune``: remove older checkpoints, and the files of interrupted saves, from a folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain.base import files
from drivetrain.checkpoints import sharded
from drivetrain.checkpoints.file import TorchCheckpointIO, check_records, entries
from drivetrain.checkpoints.foreign import is_container
from drivetrain.checkpoints.io import newest_first
from drivetrain.cli.checkpoint_inspect import size
from drivetrain.cli.checkpoint_verify import verify
from drivetrain.errors import CheckpointError, ConfigurationError, number_of
from drivetrain.strategies import rank_files

_RANK_FILE = re.compile(r"(.+)\.[0-9a-f]{8}\.rank[1-9][0-9]*")
_UNFINISHED = re.compile(r".+\.[0-9a-f]{8}" + re.escape(rank_files.UNFINISHED))
_PART = re.compile(r"\.[0-9a-f]{32}\.part")
_IN_A_SAVE = re.compile(
    rf"[0-9a-f]{{8}}\.(rank\d+\.bin|state\.json)|{re.escape(sharded.MANIFEST)}|\d+\.part|{_PART.pattern}"
)
_YOUNG = 3600  # seconds; a younger file may belong to a save that is still running


def prune(folder: str, keep: int | None = None, delete: bool = False) -> dict[str, Any]:
    """List the checkpoints and other files that can be removed from ``folder``. With ``delete``, remove these files.

    The newest complete checkpoint is never removed. The best and the last checkpoint that its ModelCheckpoint has
    recorded stay, too. So do targets of links, damaged files and files of other programs.

    Args:
        folder: the folder of a ModelCheckpoint, for example. Subfolders are not searched.
        keep: how many of the newest complete checkpoints stay. ``None``: all, so that only files of interrupted saves
            are removed.
        delete: whether to remove the files.

    Returns:
        A dictionary. ``entries`` describes each file or folder of drivetrain by ``path``, ``bytes``, ``reason`` and
        ``action``: "remove", "keep", or "failed" if the removal failed. ``others`` and ``failed`` are the numbers of
        other files and of failed removals. ``deleted`` and ``folder`` repeat the arguments.

    Raises:
        ConfigurationError: ``folder`` is no local folder, or ``keep`` is less than 1.
    """
    place = Path(files.spelled(folder))
    if files.is_remote(folder) or not place.is_dir():
        raise ConfigurationError(f"{folder} is no local folder. Pass the folder with the checkpoints.")
    if keep is not None and keep < 1:
        raise ConfigurationError(f"--keep is at least 1, not {keep}: the newest complete checkpoint always stays.")
    present = sorted(each for each in place.iterdir())
    mains = {str(each): tree for each in present if (tree := _ours(each)) is not None}
    found = [*_checkpoints(mains, present, keep), *_leftovers(present, mains)]
    known = {each["path"] for each in found}
    listed = {str(file) for main in mains for file in _beside(main, mains)}
    others = [each for each in present if str(each) not in known | listed]
    for each in found if delete else ():
        if each["action"] == "remove":
            try:
                _remove(Path(each["path"]), each["path"] in mains)
            except (OSError, CheckpointError) as error:
                each.update(action="failed", reason=f"it could not be removed completely: {error}")
    failed = sum(each["action"] == "failed" for each in found)
    return {"folder": folder, "deleted": delete, "entries": found, "others": len(others), "failed": failed}


def _entry(path: str | Path, action: str, reason: str, beside: list[Path] | None = None) -> dict[str, Any]:
    return {
        "path": str(path), "action": action, "reason": reason,
        "bytes": sum(_size(each) for each in (Path(path), *(beside or ()))),
    }  # fmt: skip


def _size(path: Path) -> int:
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(each.lstat().st_size for each in inside if not each.is_dir())


def _ours(path: Path) -> Mapping[str, Any] | None:
    """Return the entries of a complete checkpoint of drivetrain; ``None`` for any other file or folder."""
    if path.name.startswith(".") or _RANK_FILE.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name):
        return None
    if path.is_symlink() or (path.is_dir() and not sharded.is_checkpoint(path)):
        return None
    return tree if (tree := _tree(path)) is not None and "drivetrain_version" in tree else None


def _tree(path: Path) -> Mapping[str, Any] | None:
    """Return the entries of the checkpoint at ``path``, or ``None`` if there is no checkpoint."""
    try:
        tree = entries(path) if path.is_file() or path.is_dir() else None  # opening a pipe would block
    except Exception:  # another program's file may cause any exception
        return None
    return tree if isinstance(tree, Mapping) else None


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _checkpoints(
    mains: Mapping[str, Mapping[str, Any]], present: list[Path], keep: int | None
) -> Iterator[dict[str, Any]]:
    """Yield an entry of :func:`prune`'s result for each checkpoint. The newest checkpoint is the first."""
    linked = {os.path.realpath(each): each.name for each in present if each.is_symlink()}
    counts, protected, highest = {True: 0, False: 0}, dict[str, str](), {True: -1, False: -1}
    for path in newest_first(TorchCheckpointIO(), mains):
        beside = _beside(path, mains)
        if (problem := _problem(path)) is not None:
            yield _entry(path, "keep", f"damaged, so it is not counted: {problem}", beside)
            continue
        resumes = "loops" in mains[path]  # ``keep`` counts checkpoints with only weights separately
        counts[resumes] += 1
        complete, what = counts[resumes], "" if resumes else " with weights only"
        step = each if isinstance(each := mains[path].get("global_step"), int) else -1
        is_ahead, highest[resumes] = step > highest[resumes], max(step, highest[resumes])
        protected = protected or dict(_recorded(mains[path]))
        reason = linked.get(os.path.realpath(path)) and f"{linked[os.path.realpath(path)]} is a link to it"
        reason = reason or protected.get(os.path.basename(path))
        if complete == 1:
            yield _entry(path, "keep", f"the newest complete checkpoint{what}", beside)
        elif keep is None or complete <= keep:
            yield _entry(path, "keep", "complete" if keep is None else f"one of the {keep} newest{what}", beside)
        elif reason:
            yield _entry(path, "keep", reason, beside)
        elif is_ahead:  # its modification time may be wrong, or it is from an earlier run
            yield _entry(path, "keep", f"its step {step} is higher than those of the newer files{what}", beside)
        else:
            newest = "newest complete one" if keep == 1 else f"{keep} newest complete ones"
            yield _entry(path, "remove", f"older than the {newest}{what}", beside)


def _problem(path: str) -> str | None:
    try:
        return next((each["problem"] for each in verify(path)["problems"]), None)
    except CheckpointError as error:  # for example, there are no weights
        return str(error)


def _recorded(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that a checkpoint callback has recorded, and the reason to keep the file."""
    for state in (checkpoint.get("callbacks") or {}).values():
        for key, word in (("last_model_path", "last"), ("best_model_path", "best")):
            if isinstance(state, Mapping) and isinstance(path := state.get(key), str) and path:
                yield os.path.basename(path), f"ModelCheckpoint recorded it as its {word} one"


def _beside(path: str, mains: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Return the existing rank files of a checkpoint."""
    names = [Path(rank_files.place_of(each["name"], path)).name for each in mains[path].get(rank_files.LISTED, ())]
    # `place_of` resolves links. With `path`'s folder, the result can be compared with the folder's listing.
    return [each for name in names if (each := Path(path).with_name(name)).exists()]


# ---- leftovers -------------------------------------------------------------------------------------------------------


def _leftovers(present: list[Path], mains: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an entry of :func:`prune`'s result for each file or folder of an interrupted save."""
    owned = {str(each) for main in mains for each in _beside(main, mains)}
    for path in present:
        reason = ""
        match = _RANK_FILE.fullmatch(path.name)
        if path.is_symlink() or str(path) in mains or not os.access(path, os.R_OK):
            continue
        if _PART.fullmatch(path.name):
            reason = "a write that was interrupted"
        elif _UNFINISHED.fullmatch(path.name):
            reason = "a save that was not finished"
        elif match and str(path) not in owned:
            main = path.with_name(match[1])
            if os.path.lexists(main) and str(main) not in mains:
                yield _entry(path, "keep", f"{main.name} cannot be read, so it may belong to it")
                continue
            reason = (
                f"a rank file that {'no checkpoint lists' if str(main) not in mains else f'{main.name} does not list'}"
            )
        elif path.is_dir() and not sharded.is_checkpoint(path) and sharded.is_begun(path):
            reason = "a folder of shards whose save was not finished"
        elif not match and path.is_file() and is_container(path):
            with contextlib.suppress(CheckpointError, OSError):
                check_records(path, path.name)
                continue
            yield _entry(path, "keep", "damaged or cut short, so it is not counted")
        if reason and _is_of_a_save(path):
            is_young = time.time() - path.lstat().st_mtime < _YOUNG
            action = "keep" if is_young else "remove"
            yield _entry(path, action, f"{reason}, less than an hour ago: it may be running" if is_young else reason)


def _is_of_a_save(path: Path) -> bool:
    """Return whether drivetrain has probably written ``path``."""
    if path.is_dir():
        return all(each.is_file() and _IN_A_SAVE.fullmatch(each.name) for each in path.iterdir())
    if _PART.fullmatch(path.name) and path.is_file():  # it may end anywhere, so only its first bytes are checked
        with path.open("rb") as stream:
            return stream.read(4) in (b"", b"PK\3\4")
    tree = _tree(path)
    return tree is not None and (not _UNFINISHED.fullmatch(path.name) or "drivetrain_version" in tree)


def _remove(path: Path, is_checkpoint: bool) -> None:
    store = TorchCheckpointIO()
    if path.is_dir() and _UNFINISHED.fullmatch(path.name):
        shutil.rmtree(path)
    elif path.is_dir():
        sharded.remove(path)
    else:
        store.remove_checkpoint(path)
    if is_checkpoint:
        rank_files.remove_others(store, path)


def text(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a folder for the terminal."""
    words = {"keep": "keep", "failed": "failed", "remove": "removed" if result["deleted"] else "would remove"}
    for each in result["entries"]:
        yield f"{words[each['action']]:<12} {each['path']} ({size(each['bytes'])}): {each['reason']}"
    freed = sum(each["bytes"] for each in result["entries"] if each["action"] == "remove")
    others = (
        f"; {number_of(result['others'], 'other file')} stay{'s' * (result['others'] == 1)}" if result["others"] else ""
    )
    done = "freed" if result["deleted"] else "would be freed, with --delete"
    yield f"{size(freed)} {done}{others}"
