"""``drivetrain checkpoint verify``: check a checkpoint's files for wrong checksums, wrong sizes and missing parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain.base import files
from drivetrain.base.restoring import problem_of, restoring
from drivetrain.checkpoints import sharded
from drivetrain.checkpoints.file import check_records
from drivetrain.checkpoints.foreign import is_legacy
from drivetrain.cli import checkpoint_dcp, checkpoint_safetensors, checkpoint_zero
from drivetrain.cli.checkpoint_kinds import Opened, leaves, open_checkpoint
from drivetrain.errors import CheckpointError, CheckpointNameError, NoCheckpointError, number_of
from drivetrain.strategies import rank_files

_NO_CHECKSUMS = "{} has no checksums: only its sizes and its structure were checked"


def verify(path: str) -> dict[str, Any]:
    """Read the complete checkpoint at ``path``, and check the contents.

    Returns:
        A dictionary with ``ok``, ``problems`` (for each, the ``file`` and the message ``problem``) and ``notes``
        (sentences about formats without checksums).

    Raises:
        NoCheckpointError, CheckpointNameError: there is no checkpoint of a known kind.
    """
    place = Path(files.spelled(path))
    notes: list[str] = []
    kind = None
    try:
        found = open_checkpoint(path)
    except (NoCheckpointError, CheckpointNameError):
        raise
    except CheckpointError as error:
        checks = _records(place) if place.is_file() and not checkpoint_safetensors.is_file(place) else ()
        wrong = list(checks) or [(place, str(error))]
    else:
        kind = found.kind
        wrong = list(_problems(found))
        if any(map(checkpoint_safetensors.is_file, found.files)):
            notes.append(_NO_CHECKSUMS.format("safetensors"))
        elif any(file.suffix != ".safetensors" and is_legacy(file) for file in found.files):
            notes.append(_NO_CHECKSUMS.format("torch's format from before 1.6"))
    problems = [{"file": str(file), "problem": text} for file, text in wrong]
    return {"path": path, "kind": kind, "ok": not problems, "problems": problems, "notes": notes}


def first_problem(found: Opened) -> str | None:
    """Return the first problem that would not be noticed when the tensors are read; ``None`` if there is none."""
    if found.kind in ("drivetrain-sharded", "dcp"):  # reading a tensor checks its checksum
        return None
    main = Opened(found.path, found.kind, {}, found.files)  # the tree {} has no rank files to check
    return next((problem for _, problem in _problems(main)), None)


def text(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a check for the terminal."""
    for each in result["problems"]:
        yield each["problem"]
    for note in result["notes"]:
        yield f"note: {note}"
    if result["ok"]:
        yield f"{result['path']}: complete and undamaged"
    else:
        yield f"{result['path']}: damaged; {number_of(len(result['problems']), 'problem')}"


def _problems(found: Opened) -> Iterator[tuple[Path, str]]:
    if found.kind == "drivetrain-sharded":
        yield from _of_shards(found)
    elif found.kind == "dcp":
        yield from checkpoint_dcp.problems(found.path)
    elif found.kind == "deepspeed":
        yield from checkpoint_zero.problems(found.files[0].parent)
    else:
        for file in found.files:
            yield from checkpoint_safetensors.problems(file) if checkpoint_safetensors.is_file(file) else _records(file)
    for listed in found.rank_files:
        try:
            with restoring("a rank file"):
                rank_files.checked(listed, found.path)
        except CheckpointError as error:
            yield found.path, str(error)


def _records(file: Path) -> Iterator[tuple[Path, str]]:
    if not is_legacy(file) and (problem := problem_of(check_records, file, str(file))):
        yield file, problem


def _of_shards(found: Opened) -> Iterator[tuple[Path, str]]:
    """Yield a problem for each damaged tensor, or one for other damaged data. If nothing is damaged, yield a problem
    for each tensor with a missing part.
    """
    tensors = [each for _, each in leaves(found.tree) if isinstance(each, sharded.StoredTensor)]
    if damage := problem_of(sharded.verify, found.path):
        problems = [problem for each in tensors if (problem := problem_of(each.whole))]
        yield from ((found.path, problem) for problem in problems or [damage])
        return
    for each in tensors:
        if each.numel() != sum(math.prod(piece.shape) for piece in each.stored.pieces):
            yield found.path, f"{found.path}: a part of {each.called} was not saved. Use another checkpoint."
