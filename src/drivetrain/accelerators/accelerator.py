"""The contract of an accelerator (a kind of device), and the registry of all accelerators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.base.lazy import on_first_use
from drivetrain.base.registry import Entry, Registry, check_contract_version, names_itself
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.accelerators.graphs import GraphRecorder

with on_first_use:
    from drivetrain.accelerators import torch_device

HOST = torch.device("cpu")
"""The host, in whose memory everything is kept that must outlive a device."""


class Accelerator(ABC):
    """Base class of accelerators: an accelerator connects a program to one kind of hardware.

    A subclass must define five methods; the other members have defaults, which ask torch about the device type.
    Instances keep no state of a run, so several Trainers may use one instance.

    Writing a subclass is for experts, because this contract may change in a minor version. The changelog lists such
    changes.
    """

    contract_version: ClassVar[int] = 1
    """The version of this contract. A subclass may set the version for which it was written; if this is another
    version, Python raises an error where the class is defined.
    """

    # ---- required ------------------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """Return the user's ``devices`` in the form that :meth:`get_parallel_devices` accepts. An int ``n`` means the
        first n.

        The method may return its argument unchanged (2, "2", "0,1", -1): the caller converts it to device numbers.

        Raises:
            ConfigurationError: a device does not exist.
        """

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        """Return the torch devices for ``devices``, a result of :meth:`parse_devices`, in the order of ranks."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """Return the number of devices that ``devices="auto"`` and -1 mean."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Return whether this machine has such a device and torch can use it."""

    @abstractmethod
    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return statistics of ``device`` by name; the method must not wait for the device, and any thread may
        call it.
        """

    # ---- names ---------------------------------------------------------------------------------------------------

    auto_priority: int | None = None
    """``accelerator="auto"`` chooses the available accelerator with the highest priority; ``None``: "auto" never
    chooses this accelerator.

    The priorities of drivetrain's accelerators: TPU 400, MPS 300, CUDA 200, any other device type of torch 100, CPU 0.
    """

    @classmethod
    def joins_auto(cls) -> bool:
        """Return whether ``accelerator="auto"`` may choose this accelerator on this machine, provided that it is
        available.
        """
        return True

    single_device_strategy: str = "single_device"
    """The name of the strategy that ``strategy="auto"`` chooses for one of these devices."""

    parallel_strategy: str = "ddp"
    """The name of the strategy that ``strategy="auto"`` chooses for several of these devices."""

    yields_to_torch: bool = False
    """Whether torch's own device type of the same name, if it is available, is used instead of this class."""

    own_strategies_only: bool = False
    """Whether only strategies that name this accelerator in their ``facts.accelerators`` work on it."""

    @classmethod
    def register_accelerators(cls, accelerator_registry: Registry[Accelerator]) -> None:
        """Register the class under its names: ``accelerator_registry.register("name", cls, description="...")``.

        A subclass that defines this method is registered when Python executes its ``class`` statement; no call is
        needed.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_contract_version(cls, Accelerator.contract_version, "accelerator")
        names_itself(cls, "register_accelerators", AcceleratorRegistry)

    @property
    def name(self) -> str:
        """The name in plans and messages: by default the class name in lower case, without "Accelerator" at its end."""
        return type(self).__name__.removesuffix("Accelerator").lower() or "accelerator"

    # ---- facts, declared -----------------------------------------------------------------------------------------

    supports_float64: bool = True
    """Whether the device has float64 tensors; without them, epoch means are summed in float32."""

    supports_float16: bool = True
    """Whether the device computes in float16 ("16-mixed", with a scaled loss)."""

    supports_bfloat16: bool = True
    """Whether the device computes in bfloat16 ("bf16-mixed")."""

    supports_streams: bool = False
    """Whether ``torch.Stream`` and ``torch.Event`` exist for the device."""

    supports_non_blocking: bool = True
    """Whether ``tensor.to(device, non_blocking=True)`` is correct for every tensor on the host, even for one that is
    freed before the copy is done.
    """

    supports_pinned_memory: bool = False
    """Whether ``torch.empty(..., pin_memory=True)`` allocates host memory from which the device copies asynchronously;
    torch must not reuse that memory before the copy is done.
    """

    supports_several_devices: bool = True
    """Whether one job may use several of these devices."""

    device_count_is_limit: bool = False
    """Whether :meth:`auto_device_count` is the number of devices that exist, so that a larger number is an error."""

    @property
    def autocast_device_type(self) -> str:
        """The ``device_type`` for ``torch.autocast``."""
        return self.first_device.type

    @property
    def process_group_backend(self) -> str:
        """The backend of ``torch.distributed`` for these devices: by default, torch's choice for their device type."""
        return torch.distributed.get_default_backend_for_device(self.first_device)

    @cached_property
    def first_device(self) -> torch.device:
        """One of these devices, from which their device type is read; a plan sets this attribute to one of the plan's
        devices.
        """
        return self.get_parallel_devices([0])[0]

    @classmethod
    def why_unavailable(cls) -> str:
        """Return one line about what is missing on this machine, for errors and lists."""
        return "its is_available() returned False"

    # ---- life ----------------------------------------------------------------------------------------------------

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` current. Called before any process group or model exists."""
        if _is_torchs(device):
            torch.accelerator.set_device_index(device)

    def setup(self, trainer: Any) -> None:
        """Called when the strategy begins to set up the model."""

    def teardown(self) -> None:
        """Called at the very end of a run, also after an exception."""

    # ---- questions about a device --------------------------------------------------------------------------------

    def graph_recorder(self, device: torch.device) -> GraphRecorder | None:
        """Return a recorder of graphs on ``device``, for ``Trainer(cuda_graphs=...)``. ``None``: such devices have no
        graphs.

        Raises:
            RuntimeError: torch cannot record graphs on this device; the message gives the reason.
        """
        return None

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work queued on ``device`` is done."""
        if _is_torchs(device):
            torch.accelerator.synchronize(device)

    def memory_allocated(self, device: torch.device) -> int | None:
        """Return the bytes that tensors use on the device; ``None`` if their number is unknown."""
        return torch.accelerator.memory_allocated(device) if _is_torchs(device) else None

    def max_memory_allocated(self, device: torch.device) -> int | None:
        """Return the peak of :meth:`memory_allocated` since :meth:`reset_peak_memory`; ``None`` if it is unknown."""
        return torch.accelerator.max_memory_allocated(device) if _is_torchs(device) else None

    def reset_peak_memory(self, device: torch.device) -> None:
        """Reset the peak that :meth:`max_memory_allocated` returns."""
        if _is_torchs(device):
            torch.accelerator.reset_peak_memory_stats(device)

    def total_memory(self, device: torch.device) -> int | None:
        """Return the size of the device's memory in bytes; ``None`` if it is unknown."""
        if not _is_torchs(device):
            return None
        properties = getattr(torch.get_device_module(device), "get_device_properties", None)
        return None if properties is None else getattr(properties(device), "total_memory", None)


_SIMULATED = "fake"  # the name under which drivetrain.testing registers its simulated devices


class _Accelerators(Registry[Accelerator]):
    def available_accelerators(self) -> list[str]:
        """Return every registered name. The names of torch's other device types are also valid."""
        return self.available()

    def available(self) -> list[str]:
        """Return the sorted names for lists and messages. "fake", the simulated devices for tests, is left out,
        although it is valid.
        """
        return [name for name in super().available() if name != _SIMULATED or name in self._registered]

    def other_names(self, name: str) -> list[str]:
        """Return the other names that are registered for the same class and the same arguments, without importing any
        class.
        """
        own = self._registered.get(name)
        same = [] if own is None else [
            other for other, entry in self._registered.items()
            if other != name and (entry.cls, dict(entry.init_params)) == (own.cls, dict(own.init_params))
        ]  # fmt: skip
        return sorted(same)

    def check_name(self, name: str) -> None:
        if name in ("auto", "gpu"):
            raise ConfigurationError(
                f"{name!r} cannot be the name of an accelerator: it lets the Trainer choose one. Register another "
                "name, and set auto_priority so that the accelerator can be chosen."
            )

    def fallback(self, name: str) -> Entry[Accelerator] | None:
        cls = torch_device.of_type(name)
        return None if cls is None else Entry(name, cls, f"torch's device {name!r}")


AcceleratorRegistry = _Accelerators("drivetrain.accelerators", "accelerator", "accelerator", by_file=False)
"""The accelerators by name: accelerators in the files of this folder, of users, and of installed packages."""


def _is_torchs(device: torch.device) -> bool:
    """Return whether ``device`` is of the type that ``torch.accelerator`` stands for."""
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type
