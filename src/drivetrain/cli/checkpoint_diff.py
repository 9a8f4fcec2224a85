"""``drivetrain checkpoint diff``: compare two checkpoints, also of different formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoints.foreign import Placeholder
from drivetrain.checkpoints.unread import UnreadTensor
from drivetrain.cli.checkpoint_kinds import WEIGHTS_ONLY, Opened, check_ordinary, leaves, open_checkpoint
from drivetrain.errors import number_of, shown

_CHUNK = 2**22  # the number of elements that are compared at a time
_IGNORED = frozenset({"rank_files"})  # rank files get new names in every save
VERSIONS = frozenset({"drivetrain_version", "torch_version", "pytorch-lightning_version", "program"})
"""Entries with the program that wrote the checkpoint, and with versions of packages."""

_NOT_IN_LIGHTNING = frozenset({
    "drivetrain_version", "frozen_weights", "hparams_type", "optimizers", "program", "rank_files", "rank_state",
    "ranks", "restart", "rng", "torch_version",
})  # fmt: skip


def holds(kind: str, key: str) -> bool:
    """Return whether the format ``kind`` can store the entry ``key`` of a Trainer's checkpoint."""
    if kind in WEIGHTS_ONLY:
        return key == "state_dict"
    return kind not in ("lightning", "deepspeed") or key not in _NOT_IN_LIGHTNING


def diff(path: str, other: str, weights: bool = False) -> dict[str, Any]:
    """Compare two checkpoints, one tensor at a time. With ``weights``, compare only the weights.

    Entries that the format of one checkpoint cannot store are not compared.

    Returns:
        A dictionary with ``equal``, ``not_compared`` (entries), ``only_in_a`` and ``only_in_b`` (paths of entries),
        ``tensors`` and ``values`` (the differences), ``tensors_compared`` and ``values_compared`` (numbers).

    Raises:
        CheckpointError: one of the checkpoints cannot be read.
    """
    found = open_checkpoint(path), open_checkpoint(other)
    keys = found[0].tree.keys() | found[1].tree.keys()
    compared = {key for key in keys if all(holds(each.kind, key) for each in found)} - _IGNORED
    compared &= {"state_dict"} if weights else compared
    compared -= VERSIONS if found[0].kind != found[1].kind else set()
    one, two = (dict(_leaves(each, compared, found[0].kind != found[1].kind)) for each in found)
    for each in found:
        check_ordinary(each, sparse=True)
    tensors, values, unread, count = [], [], [], 0
    for name in one.keys() & two.keys():
        first, second = one[name], two[name]
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            count += 1
            if (difference := _of_tensors(first, second)) is not None:
                tensors.append({"name": name, **difference})
        elif isinstance(first, Placeholder) and isinstance(second, Placeholder) and first.path == second.path:
            unread.append(name)  # pickled objects are not read
        elif isinstance(first, Tensor) or isinstance(second, Tensor) or not _same(first, second):
            values.append({"name": name, "a": shown(first), "b": shown(second)})
    return {
        "a": path, "b": other,
        "equal": not (tensors or values or one.keys() ^ two.keys()),
        "not_compared": sorted(unread) if weights else sorted({*unread} | keys - compared - _IGNORED - VERSIONS),
        "only_in_a": _highest(one, two),
        "only_in_b": _highest(two, one),
        "tensors": sorted(tensors, key=lambda each: str(each["name"])),
        "values": sorted(values, key=lambda each: each["name"]),
        "tensors_compared": count,
        "values_compared": len(one.keys() & two.keys()) - count - len(unread),
    }  # fmt: skip


def _leaves(found: Opened, keys: Iterable[str], common: bool) -> Iterable[tuple[str, Any]]:
    """Yield the leaves of the entries ``keys``. With ``common``, the entry "loops" has only the position in training,
    because other formats have no more.
    """
    for key in sorted(keys):
        if key in found.tree:
            part = found.tree[key]
            if common and key == "loops" and isinstance(part, Mapping):
                part = {name: each for name, each in part.items() if name == "drivetrain"}
            yield from leaves(part, key)


def _highest(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the paths in ``names`` that are missing in ``others``. For a missing dictionary or list, return only its
    own path.
    """
    known = {path for name in others for path in _upwards(name)}
    return sorted({next((path for path in _upwards(name) if path not in known), name) for name in names} - known)


def _upwards(name: str) -> list[str]:
    """Return a path's ancestors and the path: "a", "a/b", "a/b/c"."""
    parts = name.split("/")
    return ["/".join(parts[: index + 1]) for index in range(len(parts))]


def _same(one: Any, other: Any) -> bool:
    same = type(one) is type(other) and one == other
    return bool(same) if isinstance(same, bool) else repr(one) == repr(other)


def _of_tensors(one: Tensor, other: Tensor) -> dict[str, Any] | None:
    """Return how two tensors differ; ``None`` if shape, dtype and bits are equal."""
    difference: dict[str, Any] = {}
    if one.dtype != other.dtype:
        difference["dtypes"] = [str(each.dtype).removeprefix("torch.") for each in (one, other)]
    if one.shape != other.shape:
        return {**difference, "shapes": [list(one.shape), list(other.shape)]}
    # no dtype could represent all values of both
    if one.dtype != other.dtype and torch.uint64 in (one.dtype, other.dtype):
        return difference
    count, unbounded = 0, 0
    largest: float = 0
    chunks: list[Any] = [torch.split(_flat(each), _CHUNK) for each in (one, other)]
    for first, second in zip(*chunks, strict=True):
        wide = _wide(one.dtype, other.dtype)
        if one.dtype == other.dtype:  # compare bits, so that NaN equals NaN, and 0.0 differs from -0.0
            bits = (each.view(torch.uint8).reshape(-1, one.dtype.itemsize) for each in (first, second))
            wrong = next(bits).ne(next(bits)).any(1)
        else:  # because torch cannot compare all pairs of dtypes
            wrong = first.to(wide) != second.to(wide)
        count += int(wrong.sum())
        if wrong.any() and wide == torch.int64:
            largest = max(largest, _integer_distance(first, second))
        elif wrong.any():
            distance = (first.to(wide)[wrong] - second.to(wide)[wrong]).abs()
            finite = distance[distance.isfinite()]
            unbounded += len(distance) - len(finite)
            largest = max(largest, float(finite.max()) if len(finite) else 0.0)
    if not count and not difference:
        return None
    return {
        **difference, "elements": one.numel(), "differing": count, "max_abs_difference": largest,
        "not_finite": unbounded,
    }  # fmt: skip


def _wide(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype in which to subtract values of these two dtypes."""
    if one.is_complex or other.is_complex:
        return torch.complex128
    return torch.float64 if one.is_floating_point or other.is_floating_point else torch.int64


def _integer_distance(one: Tensor, other: Tensor) -> int:
    """Return the largest difference between two elements, without rounding. The differences are computed in int64,
    where 2**63 or more becomes a negative number.
    """
    wide = [each.view(torch.int64) ^ -(2**63) if each.dtype == torch.uint64 else each.long() for each in (one, other)]
    distance = torch.maximum(*wide) - torch.minimum(*wide)
    large = distance[distance < 0]
    return int(large.max()) + 2**64 if len(large) else int(distance.max())


def _flat(tensor: Tensor) -> Tensor:
    plain = tensor.whole() if isinstance(tensor, UnreadTensor) else tensor.detach()
    plain = plain.to_dense() if plain.layout != torch.strided else plain.resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def text(result: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of a comparison for the terminal."""
    for name in ("a", "b"):
        yield from (f"only in {result[name]}: {each}" for each in result[f"only_in_{name}"])
    for each in result["values"]:
        yield f"{each['name']}: {each['a']} and {each['b']}"
    for each in result["tensors"]:
        parts = [" and ".join(each["dtypes"])] if "dtypes" in each else []
        if "shapes" in each:
            parts.append(" and ".join(map(str, each["shapes"])))
        elif "differing" in each:
            parts.append(f"{each['differing']} of {each['elements']} elements differ")
            parts[-1] += f", by at most {_number(each['max_abs_difference'])}" if each["differing"] else ""
            parts[-1] += f"; {each['not_finite']} differences are not finite" if each["not_finite"] else ""
        yield f"{each['name']}: {'; '.join(parts)}"
    if result["not_compared"]:
        yield f"not compared: {', '.join(result['not_compared'])}"
    tensors, values = (number_of(result[f"{what}s_compared"], what) for what in ("tensor", "value"))
    yield f"{'equal to the last bit' if result['equal'] else 'different'}: {tensors} and {values} compared"
