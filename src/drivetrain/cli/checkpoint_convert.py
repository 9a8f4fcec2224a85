"""``drivetrain checkpoint convert`` and ``consolidate``: write a checkpoint in another format, one tensor at a time."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import drivetrain
from drivetrain.base import files
from drivetrain.checkpoints.container import write_unread
from drivetrain.checkpoints.plain import MARKER, encode
from drivetrain.cli import checkpoint_dcp, checkpoint_safetensors
from drivetrain.cli.checkpoint_diff import VERSIONS, holds
from drivetrain.cli.checkpoint_kinds import WEIGHTS_ONLY, Opened, check_ordinary, open_checkpoint
from drivetrain.cli.checkpoint_verify import first_problem
from drivetrain.compat.earlier_checkpoints import fit_loop_of
from drivetrain.errors import CheckpointError, ConfigurationError, did_you_mean
from drivetrain.strategies import rank_files
from drivetrain.trainer.checkpoint import LAYOUT_VERSION
from drivetrain.trainer.rank_parts import is_inside

_OURS = ("drivetrain", "drivetrain-sharded")
_FOLDERS = ("drivetrain-sharded", "dcp", "deepspeed")
_LARGEST = 5 * 10**9  # the default largest size of a file in bytes, as in Hugging Face's libraries

NO_DEEPSPEED = (
    "DeepSpeed's folders cannot be written: their files hold flat pieces whose boundaries depend on the number of "
    "ranks, on ZeRO's stage and on the optimizer's groups in the engine that will read them, and pickled objects of "
    'its classes. Convert to "drivetrain": Trainer(strategy="deepspeed") resumes from such a file on any number of '
    "processes."
)
"""The error message for ``--to deepspeed``."""


def convert(
    path: str, out: str, to: str, strip_prefix: str = "", add_prefix: str = "", largest: int = _LARGEST
) -> dict[str, Any]:
    """Write the checkpoint at ``path`` to ``out`` in the format ``to``.

    Args:
        path: a checkpoint of any kind.
        out: a new file in an existing folder. For "dcp" and "huggingface", a new folder. ``out`` exists only after
            everything was written.
        to: one of :data:`TARGETS`.
        strip_prefix, add_prefix: a prefix to remove from the names of the weights, and a prefix to add. The format of
            ``path`` or the format ``to`` must contain only weights.
        largest: with "huggingface", the maximum bytes of a file.

    Returns:
        A dictionary with ``kind`` (of the checkpoint at ``path``), ``lost`` (the entries that the format cannot store)
        and ``notes``.

    Raises:
        CheckpointError: the source is damaged, or the format cannot store a value.
        ConfigurationError: an argument is wrong, or ``out`` exists.
    """
    if to == "deepspeed":
        raise ConfigurationError(NO_DEEPSPEED)
    if to not in TARGETS:
        raise ConfigurationError(f"There is no format {to!r}. {did_you_mean(to, TARGETS)}")
    if files.is_remote(out):
        raise ConfigurationError(f"{out} is an address, and this command writes local files. Upload the result.")
    target = Path(files.spelled(out))
    taken = ConfigurationError(f"{out} exists already. Choose a new name, or remove it.")
    if os.path.lexists(target):
        raise taken
    if not target.parent.is_dir():
        raise ConfigurationError(f"There is no folder {target.parent} for {out}. Create it, or choose another place.")
    if to == "safetensors" and not checkpoint_safetensors.is_file(target):
        raise ConfigurationError(f"{out} would not be recognized as a file of safetensors. Name it {out}.safetensors.")
    found = open_checkpoint(path)
    if (problem := first_problem(found)) is not None:
        raise CheckpointError(problem)
    if strip_prefix or add_prefix:
        if to not in WEIGHTS_ONLY and found.kind not in WEIGHTS_ONLY:
            raise ConfigurationError(
                f"--strip-prefix and --add-prefix rename weights, and {path} also holds the state of a run, which "
                "names them. Convert to safetensors or huggingface."
            )
        found.tree["state_dict"] = _renamed(found.tree["state_dict"], strip_prefix, add_prefix)
    check_ordinary(found, sparse=to in ("drivetrain", "lightning"))
    lost = [] if to == "drivetrain" and found.kind in _OURS else sorted(
        key for key in found.tree if not holds(to, key) and key not in VERSIONS
    )  # fmt: skip
    notes = list(found.notes)
    staging = files.temporary_beside(target)
    try:
        staging.mkdir()
        TARGETS[to](found, staging / target.name, lost, notes, largest)
        _publish(staging, target)
    except OSError as error:
        # Another program may have created the target meanwhile. The error is then FileExistsError or ENOTEMPTY.
        if target.exists():
            raise taken from error
        # the message must not have the temporary file's name, which `error` has
        plain = OSError(error.errno, os.strerror(error.errno)) if error.errno else error
        cure = (
            "Choose another name" if isinstance(error, FileExistsError) else "Free some space, or choose another place"
        )
        raise CheckpointError(f"{out} could not be written: {files.reason(plain, target)}. {cure}.") from error
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} holds objects that are no plain data, and cannot be converted to {to!r}: {'; '.join(notes)}. "
            "Convert the weights to safetensors, or save the checkpoint without these objects."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {"path": path, "kind": found.kind, "out": out, "to": to, "lost": lost, "notes": notes}


def consolidate(path: str, out: str) -> dict[str, Any]:
    """Write the sharded checkpoint at ``path`` as one drivetrain file. Only one tensor at a time is in memory, together
    with one shard of this tensor.

    Raises:
        CheckpointError, ConfigurationError: as in :func:`convert`, or ``path`` is a file.
    """
    kind = open_checkpoint(path).kind
    if kind not in _FOLDERS:
        raise ConfigurationError(f"{path} is no folder of shards, but of the kind {kind!r}. Convert it instead.")
    return convert(path, out, "drivetrain")


def _publish(staging: Path, target: Path) -> None:
    """Move the files from ``staging`` to ``target``, the checkpoint itself as the last. Never replace an existing file.

    Raises:
        OSError: ``target`` exists, or a file cannot be moved. Files that this call has moved are removed again.
    """
    moved: list[Path] = []
    try:
        for made in sorted(staging.iterdir(), key=lambda each: each.name == target.name):
            place = target.with_name(made.name)
            files.move(made, place, new=True)
            moved.append(place)
    except BaseException:
        for place in moved:
            place.unlink()
        raise
    files.sync_directory(target.parent)


def _renamed(state: Mapping[str, Any], strip: str, add: str) -> dict[str, Any]:
    if strip and not any(name.startswith(strip) for name in state):
        raise ConfigurationError(f"No weight's name begins with {strip!r}: the first is {next(iter(state), None)!r}.")
    renamed: dict[str, Any] = {}
    for name, value in state.items():
        if (new := f"{add}{name.removeprefix(strip)}") in renamed:
            raise ConfigurationError(
                f"Without {strip!r}, two weights would be called {new!r}: one of them is {name!r}. Convert without "
                "--strip-prefix, or rename one of them before you save."
            )
        renamed[new] = value
    return renamed


# ---- what is written -------------------------------------------------------------------------------------------------


def _write_file(tree: Mapping[str, Any], target: Path) -> None:
    with files.replacing(target, durable=True) as stream:
        write_unread(dict(tree), stream)


def _versions() -> dict[str, Any]:
    return {
        "pytorch-lightning_version": LAYOUT_VERSION, "drivetrain_version": drivetrain.__version__,
        "torch_version": str(torch.__version__),
    }  # fmt: skip


def _to_drivetrain(found: Opened, target: Path, lost: list[str], notes: list[str], largest: int) -> None:
    _write_file(_ours(found, lost), target)
    _copy_rank_files(found, target, notes)


def _copy_rank_files(found: Opened, target: Path, notes: list[str]) -> None:
    for listed in found.rank_files:
        try:
            file = rank_files.checked(listed, found.path)
        except CheckpointError as error:
            notes.append(str(error))
            continue
        suffix = re.search(r"\.[0-9a-f]{8}\.rank\d+$", file)
        assert suffix is not None  # `checked` raises for other names
        files.copy(file, f"{target}{suffix[0]}")


def _ours(found: Opened, lost: list[str]) -> dict[str, Any]:
    """Return the entries as a Trainer's checkpoint would have them: only plain data and tensors."""
    tree = found.tree
    if found.kind in _OURS or "drivetrain_version" in tree:
        return tree
    if "pytorch-lightning_version" not in tree:
        lost += sorted(str(key) for key in tree if key != "state_dict")
        return {**_versions(), "state_dict": tree["state_dict"]}
    noted: list[str] = []
    plain = {key: part if key == "state_dict" else encode(part, str(key), True, noted) for key, part in tree.items()}
    lost += noted
    if "drivetrain" in (plain.get("loops") or {}):
        plain["loops"] = {"drivetrain": plain["loops"]["drivetrain"]}
    # To resume from a checkpoint with "drivetrain_version", the Trainer needs random states, which Lightning does not
    # save. So this entry is added only without "loops": then nothing can resume from the checkpoint anyway.
    return plain if "loops" in tree else {**plain, **_versions()}


def _to_lightning(found: Opened, target: Path, lost: list[str], notes: list[str], largest: int) -> None:
    tree = {key: part for key, part in _ours(found, lost).items() if holds("lightning", key)}
    tree = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": LAYOUT_VERSION, **tree}  # Lightning needs them
    kept = ("state_dict", "optimizer_states")
    tree = {key: part if key in kept else _unmarked(part, str(key), lost) for key, part in tree.items()}
    position = (tree.get("loops") or {}).get("drivetrain")
    if position and "fit_loop" not in tree["loops"]:
        tree["loops"] = {**tree["loops"], "fit_loop": fit_loop_of(position)}
    if is_inside(found.tree) and found.rank_files:
        notes.append(f"saved inside an epoch by {rank_files.saved_by(found.rank_files)} processes: resume with as many")
    if "frozen_weights" in found.tree:
        notes.append("the checkpoint has no frozen weights: load it with strict=False over the base model")
    _write_file(tree, target)


_NOTHING = object()


def _unmarked(value: Any, path: str, lost: list[str]) -> Any:
    """Remove entries in drivetrain's own encoding, which Lightning cannot read. Add their paths to ``lost``."""
    if isinstance(value, Mapping):
        if MARKER in value:
            lost.append(path)
            return _NOTHING
        cleaned = {key: _unmarked(each, f"{path}/{key}", lost) for key, each in value.items()}
        return {key: each for key, each in cleaned.items() if each is not _NOTHING}
    if isinstance(value, list):
        items = [_unmarked(each, f"{path}/{index}", lost) for index, each in enumerate(value)]
        return [each for each in items if each is not _NOTHING]
    return value


def _to_dcp(found: Opened, target: Path, lost: list[str], notes: list[str], largest: int) -> None:
    checkpoint_dcp.write(_ours(found, lost), target)
    if tied := checkpoint_safetensors.split(found.tree["state_dict"])[1]:
        notes.append(f"tied weights become separate tensors: {', '.join(tied)} had the memory of others")
    _copy_rank_files(found, target, notes)


def _to_safetensors(found: Opened, target: Path, lost: list[str], notes: list[str], largest: int) -> None:
    lost += checkpoint_safetensors.write(found.tree["state_dict"], target)


def _to_huggingface(found: Opened, target: Path, lost: list[str], notes: list[str], largest: int) -> None:
    lost += checkpoint_safetensors.write(found.tree["state_dict"], target, largest)
    notes.append("config.json is not written: a checkpoint does not describe a model's class; copy the base model's")


TARGETS: dict[str, Callable[[Opened, Path, list[str], list[str], int], None]] = {
    "drivetrain": _to_drivetrain,
    "lightning": _to_lightning,
    "dcp": _to_dcp,
    "safetensors": _to_safetensors,
    "huggingface": _to_huggingface,
}
"""The functions that write a checkpoint, by format."""


_WORDS = {
    "optimizers": "names of parameters", "rank_files": "state of each process", "rank_state": "state of this process",
    "ranks": "state of each process", "restart": "position in the data", "rng": "random states",
}  # fmt: skip


def text(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a conversion for the terminal."""
    yield f"{result['out']}: written, from a checkpoint of the kind {result['kind']}"
    if result["lost"]:
        lost = (f"{key} ({_WORDS[key]})" if key in _WORDS else key for key in result["lost"])
        yield f"  lost: {', '.join(lost)}"
    for note in result["notes"]:
        yield f"  note: {note}"
