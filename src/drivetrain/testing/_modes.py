"""The two torch modes of the simulation. The first mode sees the calls from Python into torch. The second mode sees all
operations, also the operations of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drivetrain.base.torch_private import DispatchMode, without_torch_function
from drivetrain.testing._machine import Call, Machine, tensors_in
from drivetrain.testing._places import Place, device_at, spelled


class CallMode(TorchFunctionMode):
    """Handles the calls from Python into torch that depend on devices, or that read values without an operation."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.machine.calls.append(Call(func, args, kwargs))
        try:
            handler = _HANDLERS.get(func)
            return func(*args, **kwargs) if handler is None else handler(self.machine, func, args, kwargs)
        finally:
            self.machine.calls.pop()


class OperationMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operation of torch to the simulated devices."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return self.machine.run(func, args, kwargs or {})


# ---- calls about devices ---------------------------------------------------------------------------------------------


def _to(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Handle the three forms of ``tensor.to(...)``: with a device, with a dtype, with another tensor."""
    tensor, *positional = args
    named = dict(kwargs)

    def take(name: str) -> Any:
        return positional.pop(0) if positional else named.pop(name, None)

    other = take("other") if "other" in named or (positional and isinstance(positional[0], Tensor)) else None
    if other is not None:
        device: Any = device_at(machine.place(other))
        dtype = other.dtype
    else:
        device = None if positional and isinstance(positional[0], torch.dtype) else take("device")
        dtype = take("dtype")
    non_blocking, copy, memory_format = take("non_blocking"), take("copy"), named.pop("memory_format", None)
    device = None if device is None else torch.device(device)
    if named or positional or (device is not None and device.type != "cpu"):
        return func(*args, **kwargs)  # the device is not simulated, or torch will raise an error
    converted: Tensor = func(
        tensor, dtype or tensor.dtype, False, bool(copy), memory_format=memory_format or torch.preserve_format
    )
    target = machine.place(tensor) if device is None else device.index
    if target == machine.place(tensor):
        return converted
    return machine.move(converted, target, blocking=not non_blocking)


def _cpu(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = func(*args, **kwargs)
    return tensor if machine.place(args[0]) is None else machine.move(tensor, None)


def _type_as(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    return _to(machine, torch.Tensor.to, (args[0], *args[1:], *kwargs.values()), {})


def _device(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    place = machine.place(args[0])
    device: torch.device = func(*args, **kwargs)
    return device if place is None else device_at(place)


def _get_device(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    place = machine.place(args[0])
    number: int = func(*args, **kwargs)
    return number if place is None else place


def _empty(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Handle ``torch.empty``. Pinned memory is simulated, because torch cannot allocate pinned memory without an
    accelerator.
    """
    pins = kwargs.get("pin_memory", False)
    made: Tensor = func(*args, **{**kwargs, "pin_memory": False} if pins else kwargs)
    return machine.places.pin(made) if pins else made


def _pin_memory(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0]
    return tensor if machine.is_pinned(tensor) else machine.places.pin(tensor.clone())


def _is_pinned(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return machine.is_pinned(args[0])


def _from_data(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Handle ``torch.tensor`` and similar functions: create the tensor on the host, then move it, as torch does."""
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    method = func is torch.Tensor.new_tensor
    if device is None and not method and func is not torch.tensor and len(args) > 2:
        *args, device = args  # as_tensor(data, dtype, device)
    device = None if device is None else torch.device(device)
    if device is not None and device.type != "cpu":
        return func(*args, **kwargs, device=device)
    data = args[1:2] if method else args[:1]
    if not isinstance((data or [None])[0], Tensor):
        for element in tensors_in([*data, kwargs.get("data")]):
            if (place := machine.place(element)) is not None:
                machine.note_sync(place)  # the host reads each value
    requires_grad = kwargs.pop("requires_grad", False)
    made: Tensor = func(*args, **kwargs)
    target = device.index if device is not None else machine.place(args[0]) if method else machine.place(made)
    if machine.place(made) != target:
        made = machine.move(made, target)
    return made.requires_grad_() if requires_grad else made


# ---- calls that read values ------------------------------------------------------------------------------------------


def _read(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if (place := machine.place(args[0])) is None:
        return func(*args, **kwargs)
    machine.note_sync(place)
    with machine.hushed():
        return func(*args, **kwargs)


def _numpy(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if (place := machine.place(tensor)) is None:
        return func(*args, **kwargs)
    if kwargs.get("force"):
        return func(machine.copy(tensor.detach(), None, blocking=True), *args[1:], **kwargs)
    raise TypeError(
        f"can't convert {spelled(place)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
        "memory first."
    )


def _deepcopy(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with machine.hushed():
        copied = func(*args, **kwargs)
    machine.put(copied, machine.place(args[0]))
    if args[0].grad is not None and copied.grad is not None:
        machine.put(copied.grad, machine.place(args[0].grad))
    return copied


def _one_hot(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Handle one_hot. torch's CPU code always reads the values. A device's code reads the values only if it must find
    the number of classes.
    """
    place: Place = machine.place(args[0]) if args else None
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if place is not None and classes == -1:
        machine.note_sync(place)
    with machine.hushed():
        return func(*args, **kwargs)


def _ctc_loss(machine: Machine, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Handle ctc_loss, which accepts lengths and targets from any device."""
    if (place := machine.place(args[0])) is None:
        return func(*args, **kwargs)

    def brought(value: Any) -> Any:
        if isinstance(value, Tensor) and machine.place(value) is None:
            return machine.copy(value, place, blocking=True)
        return value

    if tensors_in([args[2:], kwargs]):
        machine.note_sync(place)
    with machine.hushed():
        return func(*map(brought, args), **{name: brought(value) for name, value in kwargs.items()})


_HANDLERS: dict[Any, Callable[[Machine, Any, Any, dict[str, Any]], Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.type_as: _type_as,
    torch.Tensor.device.__get__: _device,
    torch.Tensor.get_device: _get_device,
    torch.Tensor.new_tensor: _from_data,
    torch.empty: _empty,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.is_pinned: _is_pinned,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    torch.Tensor.tolist: _read,
    torch.Tensor.__repr__: _read,
    torch.Tensor.__format__: _read,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.ctc_loss: _ctc_loss,
}
