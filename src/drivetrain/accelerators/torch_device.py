"""Accelerators for all device types that torch knows, under torch's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from drivetrain.accelerators import graphs
from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base import torch_private
from drivetrain.errors import ConfigurationError, WrongTypeError

_NO_ACCELERATORS = frozenset({"cpu", "meta", "lazy", "xla", "hip", "privateuseone"})
"""Device types of torch that this module ignores. Such a type computes nothing, has its own file in this folder, or has
a better name.
"""

_RETIRED = frozenset({"mkldnn", "opengl", "opencl", "ideep"})
"""Device types that torch no longer has. torch still accepts the names of these types, with a warning."""


class TorchDeviceAccelerator(Accelerator):
    """The devices of ``torch.accelerator``: any vendor's GPUs, or the devices of a backend from outside torch.

    A subclass sets ``type``. If ``type`` is empty, the device type is the one for which torch was built.
    ``torch.accelerator`` and ``torch.get_device_module`` provide the number of devices, the current device and the
    memory.
    """

    type: ClassVar[str] = ""
    auto_priority = 100
    supports_streams = True
    device_count_is_limit = True

    @classmethod
    def device_type(cls) -> str:
        """torch's name for the device type, as in ``tensor.device.type``.

        Raises:
            ConfigurationError: this build of torch has no accelerator.
        """
        if cls.type:
            return cls.type
        current = torch.accelerator.current_accelerator()
        if current is None:
            raise ConfigurationError('This build of torch sees no accelerator. Write accelerator="cpu".')
        return current.type

    @classmethod
    def parse_devices(cls, devices: Any) -> list[int]:
        """Return the numbers of the selected devices. An int n, or "n", selects the first n devices, and -1 selects all
        devices. ``[i, j]`` or ``"i,j"`` selects the devices i and j.

        Raises:
            ConfigurationError: ``devices`` selects no device, a device twice, or a missing device.
        """
        return parse_indices(devices, cls.auto_device_count())

    @classmethod
    def get_parallel_devices(cls, devices: Any) -> Sequence[torch.device]:
        return [torch.device(cls.device_type(), index) for index in devices]

    @classmethod
    def auto_device_count(cls) -> int:
        module = _module_of(cls.device_type())
        return 0 if module is None else int(module.device_count())

    @classmethod
    def is_available(cls) -> bool:
        if not cls.type and torch.accelerator.current_accelerator() is None:
            return False
        module = _module_of(cls.device_type())
        return module is not None and bool(module.is_available()) and module.device_count() > 0

    @classmethod
    def why_unavailable(cls) -> str:
        if not cls.type:
            return "this build of torch has no accelerator"
        if _module_of(cls.type) is None:
            return f"torch has no module torch.{cls.type}: install and import the package that brings it"
        return f"torch.{cls.type} sees no device"

    @property
    def name(self) -> str:
        return self.device_type()

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the counters of the allocator, from ``memory_stats`` of the backend's module."""
        stats = getattr(torch.get_device_module(device), "memory_stats", None)
        if stats is None:
            return {}
        return {key: float(value) for key, value in stats(device).items() if isinstance(value, (int, float))}

    def graph_recorder(self, device: torch.device) -> graphs.GraphRecorder | None:
        return graphs.GraphRecorder(device)

    def teardown(self) -> None:
        empty_cache = getattr(torch.get_device_module(self.device_type()), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def parse_indices(devices: Any, count: int) -> list[int]:
    """Return the device numbers for a user's ``devices`` on a machine with ``count`` devices.

    Raises:
        ConfigurationError: ``devices`` selects no device, a device twice, or a missing device.
    """
    given, devices = devices, as_numbers(devices)
    if isinstance(devices, int) and not isinstance(devices, bool):
        devices = list(range(count if devices == -1 else devices))
    if not isinstance(devices, (list, tuple)) or not all(type(index) is int for index in devices):
        raise no_numbers(given)
    check_indices(given, devices, count, "this machine")
    return list(devices)


def no_numbers(given: Any) -> ConfigurationError:
    """Return the error for a value of ``devices`` that is no number, no list of numbers and no text with numbers."""
    kind = ConfigurationError if isinstance(given, str) else WrongTypeError
    return kind(f'devices={given!r} is no list of device numbers. Write devices=1, "0,1" or "auto".')


def check_indices(given: Any, indices: Sequence[int], count: int, owner: str) -> None:
    """Check that ``indices`` are different numbers from 0 to ``count`` - 1, at least one.

    Raises:
        ConfigurationError: an index is wrong or occurs twice. The message shows ``given``, the user's value, and
            ``owner``, which has the devices.
    """
    if not indices or len(set(indices)) != len(indices) or not all(0 <= index < count for index in indices):
        raise ConfigurationError(
            f"devices={given!r} means the devices {list(indices)}, but {owner} has {count}, numbered from 0. "
            "Name each device once, or write devices=-1 for all. [DT1044]"
        )


def as_auto(given: Any, accelerator: Accelerator, numbers_of: Callable[[int], list[int]]) -> Any:
    """Return "auto" if ``given`` asks for all processes that the cluster has started on this machine, and the cluster
    does not give each process one device in order. Otherwise, return ``given``.

    ``given`` asks for all processes if it is -1 or their number. "In order" means that process 0 uses device 0, process
    1 uses device 1, and so on, up to the last device. A cluster may assign one device to several processes.

    Args:
        given: ``devices`` as the user has written it.
        accelerator: the kind of device.
        numbers_of: ``devices_of_processes`` of the cluster environment.
    """
    if given == "auto" or not isinstance(given, (int, str)):
        return given
    numbers = numbers_of(shown := accelerator.auto_device_count())
    return "auto" if numbers != list(range(shown)) and str(given) in ("-1", str(len(numbers))) else given


def as_numbers(devices: Any) -> Any:
    """Return a string of digits as a count, a string with commas as a list of numbers, and any other value
    unchanged.
    """
    if not isinstance(devices, str):
        return devices
    parts = [part.strip() for part in devices.split(",") if part.strip()]
    if not parts or not all(part.removeprefix("-").isdigit() for part in parts):
        return devices
    return [int(part) for part in parts] if "," in devices else int(parts[0])


def of_type(name: str) -> type[Accelerator] | None:
    """Return the accelerator for torch's device type ``name``, or ``None`` if torch has no such type.

    torch knows the name of an external backend only after the backend's package was imported.
    """
    return _class_for(name) if name in known_types() else None


@functools.cache
def _class_for(name: str) -> type[Accelerator]:
    return type(f"{name.upper()}Accelerator", (TorchDeviceAccelerator,), {"type": name, "auto_priority": None})


def known_types() -> tuple[str, ...]:
    """Return every device type of torch that may be an accelerator. This function reads the types from torch's error
    message about an unknown type, and adds the name of an external backend.
    """
    try:
        torch.device("quantum")
    except RuntimeError as error:
        listed = str(error).partition("one of ")[2].partition(" device type")[0]
        names = [*(name.strip() for name in listed.split(",")), torch_private.foreign_device_type()]
        return tuple(name for name in names if name not in _NO_ACCELERATORS | _RETIRED)
    return ()


def _module_of(kind: str) -> Any:
    """Return the module ``torch.<kind>``, or ``None`` if the module does not exist or cannot count devices."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:
        return None
    return module if hasattr(module, "device_count") and hasattr(module, "is_available") else None
