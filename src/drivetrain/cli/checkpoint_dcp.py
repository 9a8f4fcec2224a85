"""Read and write folders of ``torch.distributed.checkpoint`` (DCP). Reading runs no pickled code.

The file ``.metadata`` is a pickle of dataclasses, which :mod:`drivetrain.checkpoints.foreign` reads without their
classes. Every other file has several items one after another, each as ``torch.save`` writes it. An item is an object,
or one process's part of a tensor.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from drivetrain.base import torch_private
from drivetrain.base.packages import dcp, dcp_api, dcp_files, dcp_saver
from drivetrain.base.restoring import problem_of, restoring
from drivetrain.checkpoints import json_tree
from drivetrain.checkpoints.foreign import read_objects, read_pickle
from drivetrain.checkpoints.part_lists import Piece, Stored
from drivetrain.checkpoints.sharded import StoredTensor
from drivetrain.errors import CheckpointError
from drivetrain.strategies.optimizer_states import by_number
from drivetrain.strategies.sharded_files import TensorNames

_METADATA = ".metadata"
_BESIDE = "meta.pt"  # Lightning's file for entries that are not tensors
_TREE = "drivetrain"  # the entry with all plain data of a Trainer's checkpoint, as JSON


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder of DCP."""
    return (path / _METADATA).is_file()


@dataclass
class _Item(Piece):
    """Where a part of a tensor is stored: ``length`` bytes of ``file``."""

    length: int = 0


class _DcpTensor(StoredTensor):
    def _read(self, piece: Piece) -> Tensor:
        assert isinstance(piece, _Item)
        found = _load(self.folder / piece.file, piece.at, piece.length, self.called)  # type: ignore[operator]  # a local folder
        if not isinstance(found, Tensor) or (found.dtype, tuple(found.shape)) != (self.dtype, piece.shape):
            raise CheckpointError(f"{self.folder}: {self.called} is not what {_METADATA} says. Use another checkpoint.")
        # Callers copy the memory, so neither a conj bit nor a neg bit may be set.
        return found.resolve_conj().resolve_neg()


class _View(io.RawIOBase):
    """A read-only file that shows ``length`` bytes of an open file, from ``at`` on."""

    def __init__(self, stream: IO[bytes], at: int, length: int) -> None:
        self._stream: Any = stream
        self._start, self._length, self._position = at, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._position)
        left = max(0, self._length - self._position)
        count: int = self._stream.readinto(memoryview(buffer).cast("B")[:left])
        self._position += count
        return count


def _load(file: Path, at: int, length: int, name: str) -> Any:
    """Return the object in the item ``name``, after checking the checksums of the item.

    Raises:
        CheckpointError: the item is missing or damaged.
    """
    try:
        with open(file, "rb") as stream:
            view: Any = _View(stream, at, length)
            with zipfile.ZipFile(view) as container:
                damaged = container.testzip()
            if damaged is not None:
                raise CheckpointError(f"{file} is damaged: the checksum of {name!r} is wrong. Use another one.")
            view.seek(0)
            try:
                return torch.load(view, map_location="cpu", weights_only=True)
            except Exception:  # the object is not plain data
                view.seek(0)
                return read_objects(view, f"{file} ({name})", map_location="cpu")
    except CheckpointError:
        raise
    except Exception as error:  # the file is missing, or the item is no intact zip archive
        raise CheckpointError(f"{file}: {name!r} is missing or damaged ({error}). Use another one.") from error


def read(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the entries of the checkpoint in the folder ``path``, and its files. Tensors are read when they are used.

    Raises:
        CheckpointError: the folder is damaged, or has a form that is not supported.
    """
    with restoring(f"{path.name}/{_METADATA}"):
        metadata = _metadata(path)
        values = dict(_values(path, metadata))
        names = {info.relative_path for info in metadata.storage_data.values()}
    found = [path / _METADATA, *(path / name for name in sorted(names))]
    if isinstance(values.get(_TREE), str):  # written by `drivetrain checkpoint convert`
        with restoring(f"{path.name}/{_TREE}"):
            return json_tree.decode(json.loads(values[_TREE]), values.__getitem__), found
    tree: dict[str, Any] = {}
    for name, value in values.items():
        _set(tree, (metadata.planner_data or {}).get(name) or (name,), value)
    beside = path / _BESIDE
    if beside.is_file():
        found.append(beside)
        tree |= _of_lightning(tree, read_objects(beside, str(beside), map_location="cpu"))
    return tree, found


def _metadata(path: Path) -> Any:
    classes = [
        dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.MetadataIndex,
        dcp.TensorProperties, dcp.StorageMeta, torch_private.MemoryFormat, torch_private.StorageInfo,
    ]  # fmt: skip
    with open(path / _METADATA, "rb") as stream:
        found = read_pickle(stream, classes, str(path / _METADATA))
    if not isinstance(found, dcp.Metadata):
        raise CheckpointError(f"{path / _METADATA} is no metadata of torch.distributed.checkpoint. Use another folder.")
    return found


def _values(path: Path, metadata: Any) -> Iterator[tuple[str, Any]]:
    places = {(each.fqn, tuple(each.offset or ())): info for each, info in metadata.storage_data.items()}
    for info in places.values():
        if Path(info.relative_path).name != info.relative_path or getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{path}: {info.relative_path} is outside of the folder, or compressed, which is not supported. "
                "Write the checkpoint without extensions."
            )
    for name, each in metadata.state_dict_metadata.items():
        if not isinstance(each, dcp.TensorStorageMetadata):
            info = places[name, ()]
            yield name, _load(path / info.relative_path, info.offset, info.length, name)
            continue
        pieces: list[Piece] = []
        for chunk in each.chunks:
            info = places.get((name, tuple(chunk.offsets))) or places[name, ()]
            offsets, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            pieces.append(_Item(info.relative_path, info.offset, 0, offsets, shape, info.length))
        dtype = str(each.properties.dtype).removeprefix("torch.")
        yield name, _DcpTensor(path, name, Stored(dtype, tuple(each.size), pieces))


def _set(tree: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Store ``value`` at ``path`` in nested dictionaries. A list becomes a dictionary with the indices as keys."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _of_lightning(tree: Mapping[str, Any], beside: Any) -> dict[str, Any]:
    """Return the entries of Lightning's sharded checkpoint. In optimizer states, parameters have numbers instead of
    names.
    """
    states: list[Any] = []
    while isinstance(state := tree.get(f"optimizer_{len(states)}"), Mapping):
        groups = state.get("param_groups", {})
        groups = [groups[key] for key in sorted(groups)] if isinstance(groups, Mapping) else groups
        listed = [each["params"] for each in groups]
        names = [list(each.values()) if isinstance(each, Mapping) else each for each in listed]
        states.append(by_number({"state": state.get("state", {}), "param_groups": groups}, names))
    return {**beside, **({"optimizer_states": states} if states else {})}


def write(tree: Mapping[str, Any], folder: Path) -> None:
    """Write a Trainer's checkpoint to the new ``folder``, one tensor at a time. The tensors get the names that FSDP's
    checkpoints have.

    Raises:
        OSError: the folder could not be written.
    """
    names = TensorNames(tree)
    text = json.dumps(json_tree.encode(dict(tree), names.of), allow_nan=False)
    state: dict[str, Any] = {"model": {}, _TREE: text}
    for name, tensor in names.tensors.items():
        inner = name.removeprefix("model.")
        (state if inner == name else state["model"])[inner] = tensor
    with warnings.catch_warnings():  # torch warns if there is no process group
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            dcp_saver.save(state, storage_writer=dcp_files.FileSystemWriter(folder), no_dist=True)
        # error.failures has only this rank's exception
        except dcp_api.CheckpointException as error:
            failure, _ = next(iter(error.failures.values()))
            raise failure from error


def problems(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the problem of each damaged or missing item of the folder."""
    with restoring(f"{path.name}/{_METADATA}"):
        metadata = _metadata(path)
    for index, info in metadata.storage_data.items():
        if problem := problem_of(_load, path / info.relative_path, info.offset, info.length, index.fqn):
            yield path / info.relative_path, problem
