"""Read and write weights in safetensors files and in model folders of Hugging Face, with the package safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.base.packages import safetensors, safetensors_torch
from drivetrain.base.restoring import entry, problem_of, restoring
from drivetrain.checkpoints.unread import UnreadTensor
from drivetrain.errors import CheckpointError, check_installed

_NAMES = ("model.safetensors", "pytorch_model.bin")
_ALIAS = "drivetrain.alias:"  # the prefix of the entries for tied weights in the file's metadata


class _Alias:
    """Stands for a tied weight: another name of the tensor ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name


def is_file(path: Path) -> bool:
    """Return whether the name of ``path`` ends with ".safetensors"."""
    return path.suffix == ".safetensors"


def files_in(folder: Path) -> list[Path]:
    """Return the files with weights in a model folder. If ``folder`` is no model folder, return an empty list.

    Raises:
        CheckpointError: the folder's index is damaged or lists a file that is missing.
    """
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            with restoring(f"{folder.name}/{index.name}"):
                listed = {*entry(json.loads(index.read_bytes()), "weight_map", (dict, {str: str})).values()}
            for each in listed:
                if Path(each).name != each or not (folder / each).is_file():
                    raise CheckpointError(f"{index} lists {each!r}, which is not in the folder. Use another one.")
            return sorted(folder / each for each in listed)
    return sorted(folder.glob("*.safetensors"))


def read(path: Path) -> dict[str, Any]:
    """Return the tensors of a file, mapped into memory. A tied weight is a placeholder, which :func:`with_aliases`
    replaces by the tensor.

    Raises:
        CheckpointError: the file is damaged.
        MissingPackageError: safetensors is not installed.
    """
    check_installed(f"Reading {path}", "safetensors")

    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            state: dict[str, Any] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            metadata = opened.metadata() or {}
    except Exception as error:
        raise CheckpointError(
            f"{path} is no file of safetensors, or was cut short ({error}). Use another one."
        ) from error
    aliases = {key.removeprefix(_ALIAS): _Alias(kept) for key, kept in metadata.items() if key.startswith(_ALIAS)}
    return state | aliases


def with_aliases(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the placeholders of tied weights in ``state``, which has the entries of all files of a model."""
    kept = {name: value.name if isinstance(value, _Alias) else name for name, value in state.items()}
    return {name: state[kept[name]] for name in state if kept[name] in state}


def write(state: Mapping[str, Any], target: Path, largest: int | None = None) -> list[str]:
    """Write tensors to a new file; with ``largest``, to a new folder with files of at most ``largest`` bytes.

    Tensors that are not in memory yet are read for one file at a time.

    Args:
        state: the weights. Entries that are no tensors are not written.
        target: the file or the folder.
        largest: the maximum bytes of a file. A larger tensor gets a file of its own.

    Returns:
        The names of the entries that are not written.

    Raises:
        CheckpointError: safetensors cannot store a tensor.
        MissingPackageError: safetensors is not installed.
    """
    check_installed(f"Writing {target.name}", "safetensors")
    tensors, aliases = split(state)
    left_out = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if largest is None:
        _save(tensors, target, aliases)
        return left_out
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(each.nbytes for each in parts[-1].values()) + tensor.nbytes > largest:
            parts.append({})
        parts[-1][name] = tensor
    target.mkdir(parents=True, exist_ok=True)
    if len(parts) == 1:
        _save(parts[0], target / _NAMES[0], aliases)
        return left_out
    numbered = [f"model-{index:05}-of-{len(parts):05}.safetensors" for index in range(1, len(parts) + 1)]
    for part, name in zip(parts, numbered, strict=True):
        _save(part, target / name, {alias: kept for alias, kept in aliases.items() if kept in part})
    size = sum(tensor.nbytes for tensor in tensors.values())
    where = {tensor: name for part, name in zip(parts, numbered, strict=True) for tensor in part}
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (target / f"{_NAMES[0]}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return left_out


def split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return two dictionaries. The first has all tensors by name, but a tied weight only under its first name. The
    second maps each other name of a tied weight to its first name.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    firsts: dict[Any, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            first = firsts.setdefault(_identity(value), name)
            if first == name:
                tensors[name] = value
            else:
                aliases[name] = first
    return tensors, aliases


def _identity(tensor: Tensor) -> Any:
    if isinstance(tensor, UnreadTensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _save(tensors: Mapping[str, Tensor], target: Path, aliases: Mapping[str, str]) -> None:
    metadata = {"format": "pt", **{f"{_ALIAS}{alias}": kept for alias, kept in aliases.items()}}
    try:
        safetensors_torch.save_file({name: _packed(each) for name, each in tensors.items()}, target, metadata)
    except OSError:
        raise
    except Exception as error:
        if (number := re.search(r"os error (\d+)", str(error))) is not None:  # for example, the disk is full
            raise OSError(int(number[1]), str(error)) from error
        raise CheckpointError(
            f"{target.name} was not written, because safetensors cannot store a tensor: {error}. Convert it to a "
            "dense one of an ordinary type."
        ) from error


def _packed(tensor: Tensor) -> Tensor:
    """Return ``tensor`` contiguous and without shared memory, as safetensors requires."""
    plain = tensor.whole() if isinstance(tensor, UnreadTensor) else tensor.detach().resolve_conj().resolve_neg()
    is_own = plain.is_contiguous() and plain.untyped_storage().nbytes() == plain.nbytes
    return plain if is_own else plain.contiguous().clone()


def problems(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the problem if its header or its size is wrong. The format has no checksums."""
    if problem := problem_of(read, path):
        yield path, problem
