"""Record a rank's allocations, operations and exchanges with other ranks while a window (the batches of an optimizer
step) runs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from drivetrain.base import torch_private
from drivetrain.base.packages import flop_counter
from drivetrain.base.torch_private import DispatchMode
from drivetrain.forecast import torch_tools
from drivetrain.forecast.operations import (
    ACTIVATIONS,
    EXCHANGED,
    GATHERED,
    GRADIENTS,
    OTHER,
    Event,
    Exchange,
    Ledger,
    Operation,
    Phase,
    Ranks,
)
from drivetrain.forecast.standins import device_numbers
from drivetrain.forecast.values import UnreadableError, Values

_SHAPES = "shapes"
"""The kind of fake tensors with which torch only computes the shapes of global tensors. A real rank does not allocate
these tensors.
"""

_MARKS = {
    "init_all_gather_outputs": GATHERED, "alloc_all_gather_outputs": GATHERED, "init_unsharded_param": GATHERED,
    "foreach_all_gather": EXCHANGED, "foreach_all_gather_copy_out": GATHERED, "foreach_reduce": EXCHANGED,
    **dict.fromkeys(torch_private.FUNCTIONS_OF_DDP, EXCHANGED), torch_private.COMPUTES_SHAPES: _SHAPES,
}  # fmt: skip
"""For each of these functions of torch, the kind of memory that the function allocates."""

_FREE = ("detach", "view", "alias", "_unsafe_view", "t", "transpose", "expand", "permute", "slice", "select", "split",
         "unsqueeze", "squeeze", "as_strided", "unbind", "chunk", "empty", "empty_like", "empty_strided")  # fmt: skip


class Lines:
    """Finds the line of the user's program that has caused an operation.

    Args:
        is_program: tells whether a file is part of the program.
    """

    def __init__(self, is_program: Callable[[str], bool]) -> None:
        self._is_program = is_program
        self._known: dict[str, bool] = {}

    def here(self) -> tuple[str, str, str]:
        """Return three texts, each of which can be "". The first is the program's line, such as "file.py:12". The
        second is the kind of memory that a function of :data:`_MARKS` on the stack allocates. The third is the name of
        this function if the function exchanges on another stream.
        """
        frame: Any = sys._getframe(2)
        mark, apart = "", ""
        while frame is not None:
            code = frame.f_code
            if (own := self._known.get(code.co_filename)) is None:
                own = self._known[code.co_filename] = self._is_program(code.co_filename)
            if own:
                return f"{code.co_filename}:{frame.f_lineno}", mark, apart
            name = code.co_name
            if name in ("run_job", torch_private.RUN_ENGINE):
                break  # the outer frames only call trainer.fit, or start the backward pass
            if not mark and name in _MARKS and "distributed" in code.co_filename:
                mark, apart = _MARKS[name], name if name in ("foreach_all_gather", "foreach_reduce") else ""
            frame = frame.f_back
        return "", mark, apart


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """A torch dispatch mode, entered after the fake mode, that records every operation on plain tensors.

    Args:
        ledger: the record to which this mode writes.
        lines: finds the program's line for each operation.
        values: the values that the program reads from tensors.
    """

    def __init__(self, ledger: Ledger, lines: Lines, values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.ledger, self.lines, self.values = ledger, lines, values
        self.phase: Phase = "forward"
        self.stack: list[str] = []
        self.modules: dict[int, str] = {}
        self.numbers: dict[int, int] = {}  # the number of each live storage, by the address of the storage's C++ object
        self.sizes: dict[int, int] = {}
        self.next = 0
        self.nodes: dict[int, tuple[str, str]] = {}
        self._node = ("", "")
        self.handles: list[Any] = []

    # ---- where the program is --------------------------------------------------------------------------------

    def watch(self, root: nn.Module, blocks: dict[str, nn.Module]) -> None:
        """Record which block contains each module of ``root``, and follow the forward passes with hooks."""
        for path, block in blocks.items():
            for each in block.modules():
                self.modules.setdefault(id(each), path)
        self.handles += [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.modules.get(id(module), self.stack[-1] if self.stack else ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()

    def _place(self) -> tuple[Phase, str, str, str, str]:
        line, mark, apart = self.lines.here()
        node = torch_tools.running_node()
        if node is None:
            return self.phase, self.stack[-1] if self.stack else "", line, mark, apart
        if self.stack and line:
            return "recompute", self.stack[-1], line, mark, apart
        # A node that accumulates a gradient belongs to no operation of the program. Such a node gets the line and the
        # block of the previous node, which has computed the gradient.
        at, block = self._node = self.nodes.get(node, self._node)
        return "backward", block or (self.stack[-1] if self.stack else ""), at or line, mark, apart

    # ---- storages --------------------------------------------------------------------------------------------

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, or ``None`` if the storage was not seen before."""
        return self.numbers.get(torch_private.storage_key(tensor.untyped_storage()))

    def hold(self, tensor: Tensor, kind: str, place: Any) -> None:
        """Count the bytes of the storage of ``tensor`` until the storage is freed."""
        storage = tensor.untyped_storage()
        key = torch_private.storage_key(storage)
        if key in self.numbers:
            return
        number, self.next = self.next, self.next + 1
        self.numbers[key], self.sizes[number] = number, 0
        self.ledger.kinds[number], self.ledger.blocks[number] = kind, place[1]
        self.ledger.makers[number] = place[4]
        self._grow(number, storage.nbytes(), place)
        weakref.finalize(storage, self._free, key, number).atexit = False

    def _grow(self, number: int, size: int, place: Any) -> None:
        if size:
            self.sizes[number] += size
            self.ledger.events.append(Event(number, size, place[0], place[1], place[2]))

    def _free(self, key: int, number: int) -> None:
        if self.numbers.get(key) == number:
            del self.numbers[key]
        phase, block, line, _, _ = self._last
        self._grow(number, -self.sizes[number], (phase, block, line))

    _last: Any = ("forward", "", "", "", "")

    def resized(self, storage: Any, before: int, after: int) -> None:
        """Record the new size of a storage that was resized in place."""
        if (number := self.numbers.get(torch_private.storage_key(storage))) is not None:
            place = self._last = self._place()
            self._grow(number, after - before, place)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of the storages of ``tensors``. Count the storages that are not counted yet."""
        for tensor in tensors:
            self.hold(tensor, kind, self._last)
            if (number := self.number(tensor)) is not None:
                self.ledger.kinds[number] = kind

    def forget(self, kind: str) -> None:
        """Count all storages of a kind as freed."""
        for number in self.numbers.values():
            if self.ledger.kinds[number] == kind:
                self._grow(number, -self.sizes[number], self._last)

    # ---- operations ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(each, "__torch_dispatch__", None) is not None and not _is_plain(each) for each in types):
            # torch will run operations on the local shards instead, and this mode will record these operations
            return NotImplemented
        kwargs = kwargs or {}
        place = self._last = self._place()
        if self.values.records:
            result = func(*args, **kwargs)
            if place[2] and torch_tools.depends_on_values(func) and not _counts_steps():
                self.values.record((place[2], place[1], str(func)), result)
            return result
        if func in _reads():
            return self._read(func, args, place)
        result = self._result(func, args, kwargs, place)
        if place[3] == _SHAPES:
            return result
        outputs, inputs = _tensors(result), _tensors((args, kwargs))
        if torch_tools.running_node() is None or place[0] == "recompute":
            self.nodes[torch_tools.newest_node()] = place[2], place[1]
        if any(each.is_sparse for each in outputs):
            raise UnreadableError(place[2] or place[1], "a sparse gradient, which sparse=False avoids")
        kind = place[3] or (ACTIVATIONS if place[0] in ("forward", "recompute") else OTHER)
        for each in outputs:
            self.hold(each, kind, place)
        self._write(func, args, place, inputs, outputs)
        return result

    def _write(self, func: Any, args: Any, place: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        phase, block, line, _, apart = place
        used = {number for each in (*inputs, *outputs) if (number := self.number(each)) is not None}
        if (name := torch_tools.collective_name(func)) is not None:
            whole = torch_tools.largest([*inputs, *outputs])
            ranks = Ranks(*device_numbers(torch_tools.ranks_of(func, args)))
            size = 0 if whole is None else whole.numel() * whole.element_size()
            dtype = "" if whole is None else str(whole.dtype).removeprefix("torch.")
            self.ledger.steps.append([Exchange(name, ranks, size, dtype, phase, block, -1), used])
            if name == "recv":
                self.mark(inputs, EXCHANGED)
            if "reduce" in name:
                self.mark(
                    [each for each in inputs if self.ledger.kinds.get(self.number(each) or -1) == OTHER], EXCHANGED
                )
            return
        if torch_private.operation_name(func) in _FREE or func.namespace in ("prim", "profiler"):  # no kernels
            return
        # FSDP calls chunk_cat to copy the gradients into one buffer before the reduce-scatter
        if torch_private.operation_name(func) == "chunk_cat":
            self.mark([each for each in inputs if each.numel()], GRADIENTS)
        bytes_moved = sum(each.numel() * each.element_size() for each in (*inputs, *outputs))
        dtype = next((str(each.dtype).removeprefix("torch.") for each in inputs if each.is_floating_point()), "")
        name = f"{func.namespace}.{torch_private.operation_name(func)}"
        flops = _flops(func, args, outputs)
        self.ledger.steps.append(
            [Operation(name, dtype, flops, bytes_moved, phase, block, line), set() if apart else used]
        )

    def _read(self, func: Any, args: Any, place: Any) -> Any:
        """Return the value that the run with real values has recorded for this read. Return zero if no value was
        recorded.
        """
        tensor, line, block = args[0], place[2], place[1]
        if place[0] == "backward":
            line = self.lines.here()[0]  # "" if torch's autograd engine or DDP reads the value
        # without a line, torch or drivetrain reads the value, for example for a logger
        if (counts := _counts_steps()) or not line:
            return tensor.dtype is torch.bool if not tensor.dtype.is_floating_point else float(counts)
        is_known, value = self.values.take((line, block, str(func)))
        reads = self.ledger.read if is_known else self.ledger.unreadable
        reads[line] = reads.get(line, 0) + 1
        zero = False if tensor.dtype is torch.bool else 0.0 if tensor.dtype.is_floating_point else 0
        return value if is_known else zero

    def array(self, own: Any, tensor: Tensor, force: bool) -> Any:
        """Called in place of ``own``, which is torch's method ``Tensor.numpy``. For a fake tensor, return the recorded
        values, or zeros if no values were recorded.
        """
        _, block, line, _, _ = self._place()
        key = line, block, "numpy"
        if not torch_tools.is_fake(tensor):
            result = own(tensor, force=force)
            if self.values.records and line:
                self.values.record(key, result.copy())
            return result
        with torch_tools.real():  # own() raises torch's errors, for example if the tensor requires a gradient
            zeros = own(torch.zeros(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad), force=force)
        is_known, value = self.values.take(key) if line else (False, zeros)
        reads = self.ledger.read if is_known else self.ledger.unreadable
        if line:
            reads[line] = reads.get(line, 0) + tensor.numel()
        # if the micro-batch is smaller than the recorded micro-batch, take the first samples
        return value[tuple(map(slice, tensor.shape))].copy() if is_known and value.ndim == zeros.ndim else zeros

    def _result(self, func: Any, args: Any, kwargs: Any, place: Any) -> Any:
        """Return the result of an operation. If the result's shape depends on values, return the recorded result.

        Raises:
            UnreadableError: the result's shape depends on values, and no result was recorded.
        """
        where = place[2] or place[1] or "an operation of the program"
        key = place[2], place[1], str(func)
        is_known, known = False, None
        if place[2] and torch_tools.depends_on_values(func) and key in self.values.known:
            # take the recorded result even if it is not needed, so that the next operation gets the next result
            is_known, known = self.values.take(key)
        try:
            return func(*args, **kwargs)
        except (torch_private.NeedsValues, torch_private.NeedsShapes) as error:
            if not is_known:
                raise UnreadableError(where, str(func)) from error
        self.ledger.read[where] = self.ledger.read.get(where, 0) + 1
        return known


def _counts_steps() -> bool:
    """Whether an optimizer is reading its step count. The recorder then returns 1 instead of 0, because an optimizer
    may divide by a function of the count.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == torch_private.READS_A_COUNT:
            return True
        frame = frame.f_back
    return False


def _is_plain(kind: Any) -> bool:
    return kind in (Tensor, nn.Parameter) or kind.__name__ == "FakeTensor"


def _reads() -> tuple[Any, ...]:
    return torch_private.read_scalar, torch.ops.aten.is_nonzero.default


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [tensor for each in value.values() for tensor in _tensors(each)] if isinstance(value, dict) else []


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _flops(func: Any, args: Any, outputs: list[Tensor]) -> int:
    if (name := torch_private.operation_name(func)) in (_ATTENTION, f"{_ATTENTION}_backward"):
        return _attention_flops(args, int(name != _ATTENTION))
    formula = flop_counter.flop_registry.get(torch_private.overloads_of(func))
    if formula is None or not outputs:
        return 0
    try:
        return int(formula(*args, out_val=outputs[0] if len(outputs) == 1 else outputs))
    # in a newer torch the formula may need other arguments; without flops, the time is computed from the bytes
    except Exception:
        return 0


def _attention_flops(args: Any, backward: int) -> int:
    """Return the floating-point operations of the CPU's flash attention, for which torch has no formula. For causal
    attention, return half of this number, because a device's kernel skips the other half.
    """
    count = flop_counter.sdpa_backward_flop_count if backward else flop_counter.sdpa_flop_count
    full = int(count(*(each.shape for each in args[: 3 + backward])))
    at = 7 if backward else 4
    return full // 2 if len(args) > at and args[at] is True else full


def finished(ledger: Ledger, first: int) -> tuple[Operation | Exchange, ...]:
    """Return the steps from index ``first`` on. Set ``waited_on_at`` of each exchange: the index of the step before
    which the rank waits for the exchange.

    A rank waits for a gather before the first operation that reads the gather's result. A rank waits for a reduction of
    gradients before the first operation after the backward pass.
    """
    steps = ledger.steps[first:]
    after = next((at for at, (each, _) in enumerate(steps) if each.phase in ("clip", "optimizer")), len(steps))
    found: list[Operation | Exchange] = []
    for at, (each, used) in enumerate(steps):
        if isinstance(each, Exchange):
            later = (n for n in range(at + 1, len(steps)) if isinstance(steps[n][0], Operation) and steps[n][1] & used)
            waits = next(later, len(steps))
            if each.phase in ("backward", "recompute") and "reduce" in each.name and waits < after:
                waits = after if each.name == "reduce_scatter" else waits
            each = replace(each, waited_on_at=waits)
        found.append(each)
    return tuple(found)
