"""Simulate devices: decide on which device the results of an operation are, whether the operation accepts operands on
different devices, and whether the host waits.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.base import torch_private
from drivetrain.base.torch_private import schema_of, without_torch_function
from drivetrain.testing._places import ANYWHERE, Place, Places, spelled, storage_of
from drivetrain.testing.record import Move, Record, Step, Sync

# The following tables list operations by name, and describe how CUDA devices behave.
# operations that copy between devices
_COPIES = frozenset({"copy_", "_foreach_copy_", "fill_"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
# operations that read no values, and whose operands can be on different devices
_ANY_MIX = frozenset({"is_same_size", "_has_same_storage_numel", "is_set_to", "set_"})
_NO_HOST_NUMBERS = frozenset({
    "cat", "stack", "embedding", "index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_", "take", "nll_loss_forward", "nll_loss2d_forward",
})  # fmt: skip
"""Operations that do not accept a host tensor without dimensions beside tensors on a device. Other operations accept
such a tensor as a number.
"""
_ON_HOST = frozenset({("_pack_padded_sequence", "lengths"), ("_pack_padded_sequence_backward", "batch_sizes")})
"""Pairs of an operation and an argument that must be on the host."""
_READS = frozenset({"equal", "is_nonzero", "allclose", "multinomial", "_linalg_check_errors", "unique_dim_consecutive"})
"""Operations for which the host waits, in addition to the operations that torch marks with a tag."""


class Call(NamedTuple):
    """A call of one of torch's functions from Python."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", self.function))


class Machine:
    """Simulates ``count`` devices, and records their events.

    Attributes:
        places: the device of each tensor.
        record: the record of the events.
        calls: the running calls from Python into torch, the innermost last.
    """

    def __init__(self, count: int) -> None:
        self.places = Places(count)
        self.record = Record(_places=self.places)
        self.calls: list[Call] = []
        self._landing: list[Place] = []  # the target device of the running move
        self._hushed = 0

    # ---- devices of tensors --------------------------------------------------------------------------------------

    def place(self, tensor: Tensor) -> Place:
        """Return the device of ``tensor``."""
        with without_torch_function():
            place = self.places.of(tensor)
        return None if place == ANYWHERE else place

    def put(self, tensor: Tensor, place: Place) -> None:
        """Set the simulated device of a tensor."""
        with without_torch_function():
            storage = storage_of(tensor)
            if place is not None and storage is not None:
                self.places.put(storage, place)

    def move(self, tensor: Tensor, target: Place, blocking: bool = True) -> Tensor:
        """Return a copy of ``tensor`` at ``target``. Autograd can differentiate through the copy."""
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Moved.apply(tensor, self, target, blocking)  # type: ignore[no-untyped-call]
        return self.copy(tensor, target, blocking)

    def copy(self, tensor: Tensor, target: Place, blocking: bool) -> Tensor:
        """Return a copy of ``tensor`` at ``target``, without recording the copy for autograd."""
        source = self.place(tensor)
        if target is not None:
            self.places.check(target)
        self._landing.append(target)
        try:
            copied = tensor.clone()
        finally:
            self._landing.pop()
        self.note_move(source, target, copied, blocking, self.is_pinned(tensor))
        return copied

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in pinned memory of the host."""
        with without_torch_function():
            return self.places.is_pinned(tensor)

    # ---- the record ----------------------------------------------------------------------------------------------

    def note_move(self, source: Place, target: Place, tensor: Tensor, blocking: bool, pinned: bool = False) -> None:
        """Record that ``tensor`` was moved from ``source`` to ``target``."""
        with without_torch_function():
            if tensor.layout is torch.sparse_coo:
                tensor = torch_private.stored_values(tensor)
            size = tensor.numel() * tensor.element_size()
        self.note_bytes(source, target, size, blocking, pinned=pinned)

    def note_bytes(
        self, source: Place, target: Place, size: int, blocking: bool, what: str | None = None, pinned: bool = False
    ) -> None:
        """Record a move of ``size`` bytes."""
        if self._hushed:
            return
        line, through = _asked_at()
        step = len(self.record.steps)
        self.record.moves.append(Move(step, line, through, source, target, size, blocking, pinned))
        if blocking and (source is None or target is None):
            device = source if source is not None else target
            assert device is not None  # the host is None, and no move is from host to host
            self.note_sync(device, what)

    def note_sync(self, device: int, what: str | None = None) -> None:
        """Record that the host waits for ``device``."""
        if self._hushed:
            return
        what = what or (self.calls[-1].name if self.calls else "an operation")
        line, through = _asked_at()
        self.record.syncs.append(Sync(len(self.record.steps), line, through, what, device))

    def note_step(self, optimizer: Optimizer) -> None:
        """Record a step of ``optimizer``."""
        places = {self.place(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        line, through = _asked_at()
        devices = tuple(sorted(places, key=_host_last))
        self.record.steps.append(Step(len(self.record.steps), line, through, type(optimizer).__name__, devices))

    @contextmanager
    def hushed(self) -> Iterator[None]:
        """Context in which moves and waits are not recorded."""
        self._hushed += 1
        try:
            yield
        finally:
            self._hushed -= 1

    # ---- one operation -------------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation ``func``, and put its results on the device of its operands.

        Raises:
            RuntimeError: the operands are on different devices, with torch's message.
        """
        name = func.overloadpacket.__name__
        if name in _COPIES:
            return self._copy_over(func, name, args, kwargs)
        if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
            return self._each(func, name, args, kwargs)
        operands = list(_operands(func, args, kwargs))
        place = None if name in _ANY_MIX else self._common(name, operands)
        result = func(*args, **kwargs)
        self._note_reads(func, name, args, place)
        target = self._target(func, kwargs, operands, place, result)
        if name == "_pack_padded_sequence":
            result, sizes = result  # the second result stays on the host
            self._put_all(result, target)
            return result, sizes
        self._put_all(result, target)
        return result

    def _target(self, func: Any, kwargs: dict[str, Any], operands: list[_Operand], place: Place, result: Any) -> Place:
        """Return the device for the results of ``func``."""
        if self._landing:
            return self._landing[-1]
        device = kwargs.get("device")
        converts = func is torch_private.to_copy
        if device is not None and device.type == "cpu" and device.index is not None:
            target = self.places.check(device)
            if converts and target != place:
                self.note_move(place, target, result, not kwargs.get("non_blocking", False))
            return target
        if device is not None and not converts and self.calls and self.calls[-1].kwargs.get("device") is not None:
            return None  # the program has passed device="cpu"
        if not operands and self._inside_torch():
            return ANYWHERE
        return place

    def _inside_torch(self) -> bool:
        """Whether torch creates this tensor as a part of an operation on a simulated device."""
        if not self.calls:
            return True  # no call from Python is running, so torch's C++ code creates the tensor
        call = self.calls[-1]
        return any(self.place(tensor) is not None for tensor in tensors_in([call.args, call.kwargs]))

    def _put_all(self, result: Any, place: Place) -> None:
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if place is not None:
                self.places.put(storage, place)
            else:
                self.places.measure(storage)

    def _common(self, name: str, operands: list[_Operand]) -> Place:
        """Return the common device of all operands. Put the operands without a device (:data:`ANYWHERE`) on this
        device.
        """
        places: dict[Place, None] = {}
        open_ones: list[Tensor] = []
        for operand, written, tensor in operands:
            place = self.places.of(tensor)
            if place == ANYWHERE:
                open_ones.append(tensor)
            elif place is not None or not _number_or_host_argument(name, operand, written, tensor):
                places[place] = None
        if len(places) > 1:
            first, second, *_ = (spelled(place) for place in sorted(places, key=_host_last))
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{first} and {second}! (when calling aten::{name}, at {_asked_at()[0]})"
            )
        if not places:
            return ANYWHERE if open_ones else None
        common = next(iter(places))
        if common is not None:
            for tensor in open_ones:
                self.places.put(storage_of(tensor), common)
        return common

    def _each(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on lists of tensors. Items with the same index must be on one device."""
        singles: list[_Operand] = []
        columns: list[list[_Operand]] = []
        for operand, written, value in _arguments(func, args, kwargs):
            if isinstance(value, Tensor):
                singles.append((operand, written, value))
            elif isinstance(value, (list, tuple)):
                columns.append([(operand, written, item) for item in value if isinstance(item, Tensor)])
        rows = max((len(column) for column in columns), default=0)
        places = [
            self._common(name, [*(column[row] for column in columns if row < len(column)), *singles])
            for row in range(rows)
        ]
        result = func(*args, **kwargs)
        if isinstance(result, (list, tuple)) and len(result) == rows:
            for part, place in zip(result, places, strict=True):
                self._put_all(part, place)
        return result

    def _copy_over(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes values into tensors. The values and the tensors can be on different devices."""
        into, values = args[0], args[1]
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        number = bool(self.calls) and self.calls[-1].name == "__setitem__" and not tensors_in(self.calls[-1].args[2:])
        result = func(*args, **kwargs)
        for one, other in zip(*(tensors_in(part) for part in (into, values)), strict=False):
            target, source = self.places.of(one), self.places.of(other)
            if ANYWHERE in (target, source):
                self._common(name, [("", False, one), ("", False, other)])
            elif target != source and not (source is None and (number or name == "fill_")):
                self.note_move(
                    source, target, other if name == "fill_" else one, blocking, self.places.is_pinned(other)
                )
        return result

    def _note_reads(self, func: Any, name: str, args: tuple[Any, ...], place: Place) -> None:
        if place is None or place == ANYWHERE:
            return
        if name in _INDEXING:
            self._note_indexing(name, args, place)
        elif name in _READS or {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.note_sync(place, None if self.calls else name)

    def _note_indexing(self, name: str, args: tuple[Any, ...], place: int) -> None:
        indices = tensors_in(args[1])
        for index in indices:
            # the index is on the host, for example a list of numbers, so torch copies it to the device
            if self.places.of(index) is None:
                self.note_move(None, place, index, blocking=True)
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        fills = len(indices) == 1 and "put" in name and args[2].numel() == 1 and self.places.of(args[2]) is None
        if masks and not fills:
            self.note_sync(place)


class _Moved(torch.autograd.Function):
    """Copies a tensor to a device in the forward pass, and copies the gradient back in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, machine: Machine, target: Place, blocking: bool) -> Tensor:
        ctx.machine, ctx.source = machine, machine.place(tensor)
        return machine.copy(tensor, target, blocking)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.machine.move(gradient, ctx.source), None, None, None


# ---- operands --------------------------------------------------------------------------------------------------------

_Operand = tuple[str, bool, Tensor]
"""The name of an argument, whether the operation writes into the argument, and the tensor."""


@functools.cache
def _parameters(func: Any) -> tuple[tuple[str, bool], ...]:
    return tuple(
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in schema_of(func).arguments
    )


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, bool, Any]]:
    for position, (name, written) in enumerate(_parameters(func)):
        if position < len(args):
            yield name, written, args[position]
        elif name in kwargs:
            yield name, written, kwargs[name]


def _operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[_Operand]:
    for name, written, value in _arguments(func, args, kwargs):
        for tensor in tensors_in(value):
            yield name, written, tensor


def _number_or_host_argument(name: str, argument: str, written: bool, tensor: Tensor) -> bool:
    """Return whether this argument can be a host tensor if other arguments are on a device."""
    if (name, argument) in _ON_HOST or (name in _INDEXING and argument == "indices"):
        return True
    return not written and tensor.dim() == 0 and name not in _NO_HOST_NUMBERS


def _host_last(place: Place) -> tuple[bool, int]:
    return place is None, place or 0


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


# ---- lines of code ---------------------------------------------------------------------------------------------------

_HERE = str(Path(__file__).parent) + os.sep
_OURS = str(Path(__file__).parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def _asked_at() -> tuple[str, str]:
    """Return two lines of code. The first is the innermost line outside torch and drivetrain. The second is the line of
    drivetrain that the first line has called, or "".
    """
    through = ""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((_HERE, _TORCH)) or _is_pythons(file)):
            if not file.startswith(_OURS):
                return _spelled(frame), through
            through = through or _spelled(frame)
        frame = frame.f_back
    return _spelled(frame), through


def _is_pythons(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_PYTHON) and "site-packages" not in file)


def _spelled(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
