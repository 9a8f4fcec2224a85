"""Open a checkpoint of any format as nested dictionaries with the keys of a Trainer's checkpoint. Tensors are read
later.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.base import files
from drivetrain.base.restoring import entry, expect, restoring
from drivetrain.base.supplied import in_our_layout
from drivetrain.checkpoints import sharded
from drivetrain.checkpoints.file import entries
from drivetrain.checkpoints.foreign import is_container, is_legacy, placeholders, read_objects
from drivetrain.cli import checkpoint_dcp, checkpoint_safetensors, checkpoint_zero
from drivetrain.errors import CheckpointError, CheckpointNameError, ConfigurationError, NoCheckpointError, first_of
from drivetrain.strategies import rank_files
from drivetrain.trainer.checkpoint import check_layout

KINDS = {
    "drivetrain": "checkpoint of drivetrain, one file",
    "drivetrain-sharded": "checkpoint of drivetrain, a folder of shards",
    "lightning": "checkpoint of Lightning",
    "torch": "file of torch.save with weights",
    "dcp": "folder of torch.distributed.checkpoint",
    "deepspeed": "folder of DeepSpeed's engine",
    "safetensors": "file of safetensors",
    "huggingface": "model folder as Hugging Face keeps them",
}
"""The formats that :func:`open_checkpoint` recognizes, by their names in the commands."""

WEIGHTS_ONLY = frozenset({"torch", "safetensors", "huggingface"})
"""The formats that contain only weights: no optimizer states and no position in training."""

_WEIGHTS = ("state_dict", "model", "module", "model_state_dict")
"""The keys under which various programs store a model's weights."""


@dataclass
class Opened:
    """A checkpoint whose tensors are read only when they are used.

    Attributes:
        path: the checkpoint's file or folder.
        kind: one of :data:`KINDS`.
        tree: the checkpoint's entries, with the weights under "state_dict".
        files: the checkpoint's files, but not the rank files beside it, which have the state of one rank each.
        notes: sentences about what the files contain, but ``tree`` does not.
    """

    path: Path
    kind: str
    tree: dict[str, Any]
    files: list[Path]
    notes: list[str] = field(default_factory=list)

    @property
    def rank_files(self) -> list[dict[str, Any]]:
        """The checkpoint's list of its rank files."""
        return list(self.tree.get(rank_files.LISTED, ()))


def open_checkpoint(path: str) -> Opened:
    """Open the local checkpoint at ``path``. Only plain data is unpickled.

    Raises:
        CheckpointError: the checkpoint does not exist, or is damaged. For an unknown format, the error is a
            CheckpointNameError.
        ConfigurationError: ``path`` is an address or a device, or the user has no permission to read ``path``.
    """
    if files.is_remote(path):
        raise ConfigurationError(f"{path} is an address, and this command reads local files. Download it first.")
    place = Path(files.spelled(path))
    if not place.exists():
        raise NoCheckpointError(f"There is no checkpoint at {path}. Check the path.")
    if not (place.is_file() or place.is_dir()):  # opening a pipe would block
        raise ConfigurationError(f"{path} is a pipe, a device or a socket. Pass a file or a folder.")
    if not os.access(place, os.R_OK):
        raise ConfigurationError(f"{path} cannot be read: you have no permission. Change its permissions.")
    with restoring(place.name):
        found = _folder(place) if place.is_dir() else _file(place)
        expect(found.tree, {"state_dict": Mapping})
        if found.kind in ("drivetrain", "drivetrain-sharded"):
            check_layout(found.tree)
    return found


def _folder(path: Path) -> Opened:
    if sharded.is_begun(path):
        tree = sharded.read(path, lazy=("",), single=True)
        return Opened(path, "drivetrain-sharded", tree, [path / name for name in sharded.files_of(path)])
    if checkpoint_dcp.is_folder(path):
        read, found = checkpoint_dcp.read(path)
        return Opened(path, "dcp", in_our_layout(_with_weights(read, path)), found)
    if (inner := checkpoint_zero.folder_of(path)) is not None:
        read, found, notes = checkpoint_zero.read(inner)
        return Opened(path, "deepspeed", in_our_layout(read), found, notes)
    if found := checkpoint_safetensors.files_in(path):
        state: dict[str, Any] = {}
        for file in found:
            is_pickle = file.suffix == ".bin"
            state |= _file(file).tree["state_dict"] if is_pickle else checkpoint_safetensors.read(file)
        return Opened(path, "huggingface", {"state_dict": checkpoint_safetensors.with_aliases(state)}, found)
    inside = sorted(each.name for each in path.iterdir())[:6]
    raise CheckpointNameError(
        f"{path} is a folder of no known kind: it contains {', '.join(inside) or 'nothing'}. Pass a file, or one of: "
        f"{', '.join(KINDS.values())}."
    )


def _file(path: Path) -> Opened:
    if checkpoint_safetensors.is_file(path):
        state = checkpoint_safetensors.with_aliases(checkpoint_safetensors.read(path))
        return Opened(path, "safetensors", {"state_dict": state}, [path])
    loaded, notes = _of_torch(path)
    if not isinstance(loaded, Mapping):
        raise CheckpointNameError(f"{path} holds a {type(loaded).__name__} and no dictionary. Use a checkpoint.")
    tree = dict(loaded)
    if "state_dict" not in tree or not {"pytorch-lightning_version", "drivetrain_version"} & tree.keys():
        return Opened(path, "torch", _with_weights(tree, path), [path], notes)
    loops = tree.get("loops") or {}
    ours = "drivetrain_version" in tree or ("drivetrain" in loops and "fit_loop" not in loops)
    return Opened(path, "drivetrain" if ours else "lightning", in_our_layout(tree), [path], notes)


def _of_torch(path: Path) -> tuple[Any, list[str]]:
    """Return the contents of a file of torch, and notes on contents that could not be read."""
    legacy = is_legacy(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True) if legacy else entries(path), []
    except (pickle.PickleError, AttributeError, TypeError, ImportError):
        loaded = read_objects(path, str(path), map_location="cpu", mmap=not legacy)
    except Exception as error:  # torch raises many types of exceptions for a malformed file
        if not (legacy or is_container(path)):
            raise CheckpointNameError(
                f"{path} is no checkpoint: it does not begin as a file of torch. Pass another path."
            ) from error
        raise CheckpointError(f"{path} is no checkpoint, or was cut short ({error}). Use another one.") from error
    left_out = [f"{where} ({name})" for where, name in placeholders(loaded)]
    note = f"objects that are no plain data are left out: {first_of(left_out, 6)}"
    return loaded, [note] if left_out else []


def _with_weights(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the entries of another program's checkpoint, with the weights under "state_dict".

    Raises:
        CheckpointNameError: no entry is a dictionary of tensors.
    """
    if _is_state_dict(tree):
        return {"state_dict": dict(tree)}
    holders = [tree, *(each for each in tree.values() if isinstance(each, Mapping))]
    for holder in holders:
        for key in _WEIGHTS:
            if isinstance(holder.get(key), Mapping) and _is_state_dict(holder[key]):
                others = {name: value for name, value in tree.items() if value is not holder}
                others |= dict(holder)
                return {"state_dict": dict(others.pop(key)), **others}
    raise CheckpointNameError(
        f"{path} has no weights under {', '.join(map(repr, _WEIGHTS))}, only {sorted(map(str, tree))[:8]}. Use a "
        "checkpoint that has."
    )


def _is_state_dict(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(
        isinstance(each, Tensor) or str(key).endswith("_extra_state") for key, each in value.items()
    )


def check_ordinary(found: Opened, sparse: bool) -> None:
    """Raise an error if a tensor is quantized, or if a tensor is sparse and ``sparse`` is False.

    Raises:
        CheckpointError: such a tensor exists. The message names it.
    """
    for name, each in leaves(found.tree):
        if isinstance(each, Tensor) and (each.is_quantized or (each.layout != torch.strided and not sparse)):
            kind, cure = ("quantized", "dequantize") if each.is_quantized else ("sparse", "to_dense")
            raise CheckpointError(
                f"{found.path}: {name} is a {kind} tensor, which is not supported here. Save {cure}() of it instead."
            )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every leaf in dictionaries, lists and tuples: ``("state_dict/layer.bias", ...)``.

    A list of plain values, such as a random state, is one leaf. An empty container is also a leaf.
    """
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(each, (Tensor, Mapping, list, tuple)) for each in value):
        items = enumerate(value)
    if not items:
        yield path, value
    for key, item in items:
        yield from leaves(item, f"{path}/{key}" if path else str(key))


def size_of(found: Opened) -> int:
    """Return the number of bytes in the checkpoint's files and its existing rank files."""
    with restoring("rank_files"):
        beside = [rank_files.place_of(entry(each, "name", str), found.path) for each in found.rank_files]
    return sum(map(os.path.getsize, found.files)) + sum(
        os.path.getsize(each) for each in beside if os.path.isfile(each)
    )
