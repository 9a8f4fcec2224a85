"""Move and detach nested batches, find their leaves and sizes, and list an optimizer's parameters and gradients.

A batch is a tree. The leaves are tensors, or other objects with a method ``to``. The nodes are lists, tuples, named
tuples, mappings and dataclasses. Every function keeps the types of the nodes and returns all other values unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_NUMBERS = frozenset({int, float, bool, str, type(None)})
_HOST = torch.device("cpu")

BLOCKING: set[str] = set()
"""Device types to which drivetrain copies with ``non_blocking=False``, because torch does not keep the source of a
non-blocking copy alive. An Engine adds the type of its device if the accelerator has ``supports_non_blocking=False``.
"""


@runtime_checkable
class Movable(Protocol):
    """A leaf with a ``to`` method: a tensor, a PackedSequence, a graph batch, a BatchEncoding.

    ``to`` may move the object in place. It then returns the object itself, or ``None``.
    """

    def to(self, device: Any) -> Any: ...


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``fn`` applied to every leaf. The containers in the result have the same types."""
    if isinstance(tree, Tensor) or hasattr(tree, "to"):  # a PackedSequence is a tuple, but has a method ``to``
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return like_list(tree, [map_leaves(fn, item) for item in tree])
    if isinstance(tree, Mapping):
        return like_mapping(tree, {key: map_leaves(fn, value) for key, value in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = ((field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree))
        return like_dataclass(tree, {name: map_leaves(fn, value) for name, value in values})
    return fn(tree)


def like_list(like: Any, items: list[Any]) -> Any:
    """Return a list, tuple or named tuple of the type of ``like`` that contains ``items``."""
    if type(like) is list:
        return items
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def like_mapping(like: Any, values: dict[Any, Any]) -> Any:
    """Return a mapping of the type of ``like`` that contains ``values``."""
    if type(like) is dict:
        return values
    rebuilt = copy.copy(like)  # copy() keeps a default factory and other state
    for key, value in values.items():  # the ModelOutput of transformers has no update()
        rebuilt[key] = value
    return rebuilt


def like_dataclass(like: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of the dataclass ``like`` whose fields have ``values``."""
    rebuilt = copy.copy(like)
    for name, value in values.items():
        object.__setattr__(rebuilt, name, value)  # also works for frozen dataclasses
    return rebuilt


def move(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with every leaf on ``device``.

    A copy to a device does not block the host, because later operations on the device's stream wait for the copy. A
    copy to the host, or to a device type in :data:`BLOCKING`, blocks the host. Otherwise, the host could read or write
    too early. A leaf that is already on ``device`` is returned unchanged.
    """
    kind = type(batch)
    if kind is list or kind is tuple:
        for item in batch:
            if not (isinstance(item, Tensor) and item.device == device):
                break
        else:
            return batch  # nothing has moved: return the same object, as in a loop without drivetrain
    target = torch.device(device)  # ``device`` may be a name
    non_blocking = target != _HOST and target.type not in BLOCKING
    return map_leaves(lambda leaf: _move_leaf(leaf, device, non_blocking), batch)


def _move_leaf(leaf: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(leaf, Tensor):
        return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
    if isinstance(leaf, Movable) and not isinstance(leaf, type):
        moved = leaf.to(device)
        return leaf if moved is None else moved
    return leaf


def was_there(batch: Any, moved: Any) -> bool:
    """Return whether ``batch`` was on the device before ``moved = move(batch, device)``. The result is always False for
    types other than list, tuple and tensor, because they may move in place.
    """
    kind = type(batch)
    return moved is batch and (kind is list or kind is tuple or isinstance(batch, Tensor))


def dtensor() -> Any:
    """Return torch's class ``DTensor``; ``()`` if the program has not imported it."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(value: Any) -> bool:
    """Return whether ``value`` is a DTensor, a tensor with shards in several processes."""
    return isinstance(value, dtensor())


def first_dtensor(tree: Any) -> str | None:
    """Return the path of a DTensor in nested lists, tuples and mappings, such as ``"a/0"``; ``None`` without a DTensor.
    The loop makes no call for each number, because random states contain thousands of numbers.
    """
    if not (sharded := dtensor()):
        return None
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    for path, value in waiting:  # the list grows during the loop
        if isinstance(value, sharded):
            return "/".join(map(str, path))
        if isinstance(value, Mapping):
            waiting += [((*path, key), item) for key, item in value.items() if type(item) not in _NUMBERS]
        elif isinstance(value, (list, tuple)):
            waiting += [((*path, i), item) for i, item in enumerate(value) if type(item) not in _NUMBERS]
    return None


def move_to_host(tree: Any) -> Any:
    """Return ``tree`` with every tensor detached and in host memory. The call waits for the device."""
    return map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)


def cloned(tree: Any) -> Any:
    """Return ``tree`` with every tensor cloned."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def detach(tree: Any) -> Any:
    """Return ``tree`` with every tensor detached, so that the result keeps no activations alive."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def batch_sizes(tree: Any, iterated: bool = False) -> Iterator[int]:
    """Yield the first dimension of each tensor in ``tree``; 1 for a tensor without dimensions. With ``iterated``, the
    function iterates over every iterable object, even over an iterable dataclass.
    """
    parts: Iterable[Any] = ()
    if isinstance(tree, Tensor):
        yield tree.shape[0] if tree.ndim else 1
    elif isinstance(tree, Mapping):
        parts = tree.values()
    elif iterated and isinstance(tree, Iterable) and not isinstance(tree, (str, bytes)):
        parts = tree
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = (getattr(tree, field.name) for field in dataclasses.fields(tree))
    elif isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        parts = tree
    for part in parts:
        yield from batch_sizes(part, iterated)


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf of lists, tuples and mappings: ``("a/0", leaf)``. If ``tree`` itself is
    a leaf, the path is ``""``.
    """
    if isinstance(tree, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = iter(enumerate(tree))
    else:
        yield "", tree
        return
    for key, value in items:
        for path, leaf in leaves(value):
            yield f"{key}/{path}" if path else str(key), leaf


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return all parameters in the optimizer's parameter groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Any) -> list[Tensor]:
    """Return the gradients of the optimizer's parameters, without those that are ``None``."""
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def rescale(optimizers: Optimizer | Sequence[Optimizer] | None, factor: float | Tensor) -> None:
    """Multiply the gradients of the parameters of one or more optimizers by ``factor``."""
    for optimizer in optimizers if isinstance(optimizers, Sequence) else [optimizers]:
        for gradient in [] if optimizer is None else gradients_of(optimizer):
            gradient.mul_(factor)
