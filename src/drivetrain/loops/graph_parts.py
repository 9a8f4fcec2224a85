"""Helpers with which ``graphs.py`` records a training step as a device graph: signatures of batches, detection of
changed objects, and learning rates on the device.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.introspect import is_own_class
from drivetrain.base.torch_private import expect_no_graph, gradient_facts
from drivetrain.logbook.entry import Options

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})


class CannotRecord(Exception):
    """A step cannot be recorded. The message says why."""


# ---- the batch -------------------------------------------------------------------------------------------------------


def signature(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return the signature of ``batch``, and the tensors in ``batch``. The signature contains the structure of the
    batch, the shape, type and strides of each tensor, and all other values. A graph is valid for all batches with its
    signature.

    Raises:
        CannotRecord: the batch holds an object that is not plain data, or a tensor whose values a replay cannot copy.
    """
    found: list[Any] = []
    tensors: list[Tensor] = []
    _describe(batch, device, found, tensors)
    return tuple(found), tensors


def _describe(value: Any, device: torch.device, found: list[Any], tensors: list[Tensor]) -> None:
    kind = type(value)
    if kind is Tensor:
        if value.device != device or value.layout is not torch.strided or value.requires_grad:
            raise CannotRecord(f"the batch holds a tensor on {value.device} ({value.layout}), or one with gradients")
        found.append((value.shape, value.dtype, value.stride()))
        tensors.append(value)
    elif kind in _PLAIN:
        found.append((kind, value))
    elif kind is list or kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        found.append((kind, len(value)))
        for item in value:
            _describe(item, device, found, tensors)
    elif isinstance(value, Mapping) and not hasattr(value, "to"):
        found.append((kind, *value))
        for item in value.values():
            _describe(item, device, found, tensors)
    elif is_dataclass(value) and not hasattr(value, "to"):
        found.append(kind)
        for field in fields(value):
            _describe(getattr(value, field.name), device, found, tensors)
    else:
        raise CannotRecord(f"the batch holds a {kind.__name__}")


# ---- what must not change between replays ----------------------------------------------------------------------------

_NEVER_READ = ("_state_dict", "_load_state_dict", "_non_persistent", "_trainer", "_book")
"""A step does not read module attributes whose names begin with these prefixes."""


class Watched:
    """Detects changes of attributes, optimizer options and tensors. A step reads these objects, but a replay of its
    graph does not.

    Args:
        module: the user's module. Its attributes, its layers' attributes, and containers in these attributes are
            watched.
        optimizer: the optimizer of the step. The learning rates are not watched, because the graph reads them from the
            device.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        seen: set[int] = set()
        self._places = [place for name, each in module.named_modules() for place in _module_places(name, each, seen)]
        self._places += [("the optimizer", vars(optimizer)), ("the optimizer's state", optimizer.state)]
        self._places += [("the optimizer's state", each) for each in optimizer.state.values()]
        for index, group in enumerate(optimizer.param_groups):
            self._places += [(f"parameter group {index}", _WithoutRate(group)), (f"group {index}", group["params"])]
        self._items = [each.values() if isinstance(each, dict) else each for _, each in self._places]
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self._learn()

    def _learn(self) -> None:
        self._known = [list(items) for items in self._items]
        self._flat = list(chain.from_iterable(self._known))
        self._of_tensors = gradient_facts(self.tensors)

    def changed(self) -> str:
        """Return the name of a watched object that has changed; "" if no object has changed.

        A call takes about 20 ns for each watched value.
        """
        now = list(chain.from_iterable(self._items))
        same = len(now) == len(self._flat) and all(map(operator.is_, now, self._flat))
        if same and gradient_facts(self.tensors) == self._of_tensors:
            return ""
        for (name, place), items, known in zip(self._places, self._items, self._known, strict=True):
            values = list(items)
            if len(values) != len(known):
                return name
            for index, (value, before) in enumerate(zip(values, known, strict=True)):
                if value is not before and not (type(value) is type(before) in _PLAIN and value == before):
                    return f"{name}.{list(place)[index]}" if isinstance(place, dict) else name
        if gradient_facts(self.tensors) != self._of_tensors:
            return "a parameter or a buffer (its memory, whether it requires gradients, or a hook)"
        self._learn()  # watch the new objects, whose values are equal
        return ""


class _WithoutRate:
    """Yields the options of a parameter group, except the learning rate.

    These options are watched, because a graph contains their values.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group

    def __iter__(self) -> Iterator[Any]:
        return (value for key, value in self._group.items() if key not in ("lr", "initial_lr", "params"))


def _module_places(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Any]]:
    name = name or type(module).__name__
    yield name, vars(module)
    for key, value in vars(module).items():
        if not key.startswith(_NEVER_READ):
            yield from _places(f"{name}.{key}", value, seen, 3)


def _places(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a name and a container: the mutable containers in ``value``, and the ``vars`` of user-defined
    objects.
    """
    if id(value) in seen or type(value) in _PLAIN or isinstance(value, (Tensor, nn.Module, type)) or not depth:
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        yield name, value
        inside = value.values()
    elif isinstance(value, (list, set, deque)):
        yield name, value
        inside = value
    elif isinstance(value, tuple):
        inside = value
    elif hasattr(value, "__dict__") and not callable(value) and not is_own_class(type(value)):
        yield name, vars(value)
        inside = vars(value).values()
    for each in list(inside):
        yield from _places(name, each, seen, depth - 1)


# ---- what a step must not read while it is recorded ------------------------------------------------------------------

_CONSTANT = frozenset({
    "is_global_zero", "global_rank", "local_rank", "node_rank", "world_size", "num_nodes", "num_devices", "precision",
})  # fmt: skip
"""A recorded step may read these attributes of a Trainer, because the attributes never change during a run."""


class TrainerWhileRecording:
    """Replaces the Trainer while a step is recorded; raises if the step reads a value that may change between steps."""

    def __init__(self, trainer: Any, reads: list[str]) -> None:
        self.__dict__.update(_trainer=trainer, _reads=reads)

    def __getattr__(self, name: str) -> Any:
        if name not in _CONSTANT:
            self._reads.append(f"training_step reads {name} of the Trainer")
            raise CannotRecord(self._reads[-1])
        return getattr(self._trainer, name)


def index_while_recording(reads: list[str]) -> Any:
    """Return a replacement for ``batch_idx``. The step may pass the replacement to a function, but any use of its value
    raises.
    """

    def read(*_: Any) -> Any:
        reads.append("training_step reads batch_idx, which differs from step to step")
        raise CannotRecord(reads[-1])

    operations = {name for name in dir(int) if name.startswith("__") and name not in dir(object)}
    operations |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__", "__format__"}
    return type("BatchIndexWhileRecording", (), {**dict.fromkeys(operations, read), "__class__": property(read)})()


class RecordedLogs:
    """Replaces a module's logbook while a step is recorded, and stores the ``self.log`` calls."""

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.calls: list[tuple[str, Any, Options, Any]] = []

    @property
    def scope(self) -> RecordedLogs:
        """This object, which ``self.log`` uses in place of a :class:`~drivetrain.logbook.logbook.Scope`."""
        return self

    def open_entry(self, name: str, value: Any, options: Options, batch_size: Any = None) -> RecordedLogs:
        """Store one call of ``self.log``."""
        value = value.detach() if isinstance(value, Tensor) and not options.enable_graph else value
        self.calls.append((name, value, options, batch_size))
        return self

    def push(self, value: Any, batch_size: Any) -> None:
        """Do nothing: :meth:`open_entry` has stored the value."""

    def check(self) -> None:
        """Check that a replay can repeat the recorded calls without running the user's Python code.

        Raises:
            CannotRecord: a call logs a metric object, or passes ``enable_graph=True``.
        """
        for name, value, options, _ in self.calls:
            if options.enable_graph or isinstance(value, nn.Module):
                raise CannotRecord(f"self.log({name!r}, ...) got a metric object or enable_graph=True")


# ---- learning rates --------------------------------------------------------------------------------------------------


class DeviceRates:
    """Context in which an optimizer reads its learning rates and step counts from the device.

    Outside the context, the parameter groups contain the learning rates and options that the user and the schedulers
    set.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self._device = optimizer, device
        self._fused = _has_fused_kernel(optimizer)
        self._rates: list[Tensor] = []
        self._values: list[Any] = []
        self._outside: list[dict[str, Any]] = []
        expect_no_graph(optimizer)

    def refresh(self) -> None:
        """Copy the current learning rates to the device."""
        groups = self.optimizer.param_groups
        if len(self._rates) != len(groups):
            wide = not self._fused and groups[0]["params"][0].dtype is torch.float64
            self._rates = [
                torch.zeros((), device=self._device, dtype=torch.float64 if wide else torch.float32) for _ in groups
            ]
            self._values = [None] * len(groups)
        for index, group in enumerate(groups):
            if isinstance(rate := group["lr"], Tensor):
                self._rates[index].copy_(rate)
            elif rate != self._values[index]:
                self._rates[index].fill_(rate)
                self._values[index] = rate

    def __enter__(self) -> None:
        self.place(self._device)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            inside: dict[str, Any] = {"lr": rate}
            if "capturable" in group:
                inside["capturable"] = True
            if self._fused:
                inside |= {"fused": True, "foreach": False}
            if self._fused and self._has_some_buffers(group):
                inside = {}  # the fused kernel needs momentum buffers for all parameters or for none
            self._outside.append({key: group[key] for key in inside})
            group.update(inside)

    def __exit__(self, *_: object) -> None:
        for group, outside in zip(self.optimizer.param_groups, self._outside, strict=False):
            group.update(outside)
        self._outside.clear()

    def _has_some_buffers(self, group: dict[str, Any]) -> bool:
        states = [self.optimizer.state.get(each, {}) for each in group["params"] if each.grad is not None]
        buffers = [state.get("momentum_buffer") is not None for state in states]
        return any(buffers) and not all(buffers)

    def place(self, device: torch.device) -> None:
        """Move the step counts to ``device``."""
        for state in self.optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor) and step.device != device:
                state["step"] = step.to(device)

    def end(self) -> None:
        """Move the step counts to the host. With the user's option ``capturable`` or ``fused``, the step counts stay on
        the device.
        """
        kept = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        self.place(self._device if kept else HOST)


def _has_fused_kernel(optimizer: Optimizer) -> bool:
    """Return whether the optimizer steps with torch's fused kernel inside a :class:`DeviceRates`.

    With SGD, only the fused kernel reads learning rates from the device. Adam and AdamW can also read learning rates
    with ``capturable``, which is slower than ``fused``. For Adam and AdamW, the result is false if the user has chosen
    a kernel. The result is also false if a parameter has 64 bits, because fused kernels read learning rates in 32 bits.
    """
    if type(optimizer) not in (Adam, AdamW):
        return type(optimizer) is SGD
    groups = optimizer.param_groups
    chosen = any(group["foreach"] is not None or group["fused"] is not None for group in groups)
    return not chosen and all(each.dtype is not torch.float64 for group in groups for each in group["params"])


# ---- what a step changes ---------------------------------------------------------------------------------------------


def changed_by_step(watched: Watched, optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that a training step may change."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    kept = [each.grad for each in watched.tensors if each.grad is not None and id(each) not in stepped]
    return [*watched.tensors, *states, *kept]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of ``tensors``."""
    return [each.detach().clone() for each in tensors]


def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write ``values`` into ``tensors``."""
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def same_bits(ours: Any, theirs: Any) -> bool:
    """Return whether two trees of tensors and plain values are equal bit for bit."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return False
        one, other = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (ours, theirs))
        return torch.equal(one, other)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Mapping):
        return list(ours) == list(theirs) and same_bits(list(ours.values()), list(theirs.values()))
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
    return bool(ours == theirs)
