"""Convert plain data to JSON and back, with the names of tensors in place of tensors."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from drivetrain.base.restoring import WrongForm
from drivetrain.errors import CheckpointError, described

_AS_IS = frozenset({type(None), bool, int, str})
_TYPES: dict[type, str] = {tuple: "tuple", set: "set", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {OrderedDict: "ordered", Counter: "counter"}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float, "$complex": lambda parts: complex(*parts), "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)), "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device, "$tuple": tuple, "$set": set, "$size": torch.Size, "$dict": dict, "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}  # fmt: skip


def encode(value: Any, name_of: Callable[[tuple[Any, ...], Tensor], str], path: tuple[Any, ...] = ()) -> Any:
    """Convert ``value`` to data that JSON stores exactly.

    Args:
        value: a result of ``plain.encode``.
        name_of: a function that gets a path and a tensor, and returns the tensor's stored name.
        path: the path of ``value`` in the checkpoint.

    Raises:
        CheckpointError: ``value`` contains an object that JSON cannot represent.
    """
    kind = type(value)
    if kind in _AS_IS or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": name_of(path, value)}
    if kind is list:
        return _encoded(enumerate(value), name_of, path)
    if kind is dict and {*map(type, value)} <= {str} and "$" not in {key[:1] for key in value}:
        return dict(zip(value, _encoded(value.items(), name_of, path), strict=True))
    if isinstance(value, dict):
        keys = _encoded(enumerate(value), name_of, ())
        pairs = zip(keys, _encoded(value.items(), name_of, path), strict=True)
        return {f"${_MAPPINGS.get(kind, 'dict')}": [[key, item] for key, item in pairs]}
    if kind in _TYPES:
        return {f"${_TYPES[kind]}": _encoded(enumerate(value), name_of, path)}
    if kind is float:
        return {"$float": repr(value)}
    if kind is complex:
        return {"$complex": [encode(value.real, name_of), encode(value.imag, name_of)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {f"${kind.__name__}": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"{'/'.join(map(str, path))} is {described(value)}, and a sharded checkpoint holds plain data and tensors "
        'only. Leave it out, or use state_dict_type="full".'
    )


def _encoded(
    items: Iterable[tuple[Any, Any]], name_of: Callable[[tuple[Any, ...], Tensor], str], path: tuple[Any, ...]
) -> list[Any]:
    # Make no function call for a number, because a random state has hundreds of numbers.
    return [item if type(item) in _AS_IS else encode(item, name_of, (*path, key)) for key, item in items]


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Reverse :func:`encode`.

    Args:
        value: data parsed from JSON.
        tensor: a function that returns the tensor with a name.

    Raises:
        WrongForm: ``value`` does not come from :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (mark := next(iter(value))).startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    inner = value[mark]
    if mark == "$tensor":
        return tensor(inner)
    if mark not in _DECODERS:
        raise WrongForm("", f"has the unknown mark {mark!r}")
    return _DECODERS[mark](decode(inner, tensor))
