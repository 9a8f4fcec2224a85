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
"""The host. Tensors that must outlive a device are kept in host memory."""


class Accelerator(ABC):
    """Base class of accelerators: an accelerator connects a program to one kind of hardware.

    A subclass must define five methods. All other members have defaults, which use torch's functions for the device
    type. Instances keep no state of a run, so several Trainers may use one instance.

    Writing a subclass is for experts, because this contract may change in a minor version. The changelog lists changes
    of the contract.
    """

    contract_version: ClassVar[int] = 1
    """The version of this contract. A subclass can set the version that it was written for. With any version other than
    the current version, the class statement raises an error.
    """

    # ---- required ------------------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> Any:
        """Convert the user's ``devices`` to the form that :meth:`get_parallel_devices` accepts. An int ``n`` means the
        first n devices.

        The method may return its argument unchanged (2, "2", "0,1", -1). The caller then converts the argument to
        device numbers.

        Raises:
            ConfigurationError: a device does not exist.
        """

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        """Return the torch devices for ``devices``, in the order of ranks. ``devices`` is a result of
        :meth:`parse_devices`.
        """

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """Return the number of devices that ``devices="auto"`` and -1 mean."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Return whether torch can use a device of this kind on this machine."""

    @abstractmethod
    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return statistics of ``device`` by name. The method must not wait for the device, and any thread may call the
        method.
        """

    # ---- names ---------------------------------------------------------------------------------------------------

    auto_priority: int | None = None
    """``accelerator="auto"`` chooses the available accelerator with the highest priority. With ``None``, "auto" never
    chooses this accelerator.

    The priorities of drivetrain's accelerators: TPU 400, MPS 300, CUDA 200, any other device type of torch 100, CPU 0.
    """

    @classmethod
    def joins_auto(cls) -> bool:
        """Return whether ``accelerator="auto"`` may choose this accelerator on this machine. This method need not check
        whether the accelerator is available.
        """
        return True

    single_device_strategy: str = "single_device"
    """The name of the strategy that ``strategy="auto"`` chooses for one device of this kind."""

    parallel_strategy: str = "ddp"
    """The name of the strategy that ``strategy="auto"`` chooses for several devices of this kind."""

    yields_to_torch: bool = False
    """Whether torch's own device type with the same name, if available, replaces this class."""

    own_strategies_only: bool = False
    """Whether this accelerator works only with strategies whose ``facts.accelerators`` contains its name or device
    type.
    """

    @classmethod
    def register_accelerators(cls, accelerator_registry: Registry[Accelerator]) -> None:
        """Call ``accelerator_registry.register("name", cls, description="...")`` for each name of the class.

        Called once, when a subclass that defines this method is created. No other registration is necessary.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_contract_version(cls, Accelerator.contract_version, "accelerator")
        names_itself(cls, "register_accelerators", AcceleratorRegistry)

    @property
    def name(self) -> str:
        """The name in plans and messages. The default is the class name in lower case, without "Accelerator" at the
        end.
        """
        return type(self).__name__.removesuffix("Accelerator").lower() or "accelerator"

    # ---- properties of the devices -------------------------------------------------------------------------------

    supports_float64: bool = True
    """Whether the device has float64 tensors. If not, epoch means are summed in float32."""

    supports_float16: bool = True
    """Whether the device computes in float16 ("16-mixed", with a scaled loss)."""

    supports_bfloat16: bool = True
    """Whether the device computes in bfloat16 ("bf16-mixed")."""

    supports_streams: bool = False
    """Whether ``torch.Stream`` and ``torch.Event`` exist for the device."""

    supports_non_blocking: bool = True
    """Whether ``tensor.to(device, non_blocking=True)`` copies every host tensor correctly, even a tensor that is freed
    before the copy ends.
    """

    supports_pinned_memory: bool = False
    """Whether ``torch.empty(..., pin_memory=True)`` allocates host memory from which the device copies asynchronously.
    torch must not reuse such memory before the end of the copy.
    """

    supports_several_devices: bool = True
    """Whether one job can use several devices of this kind."""

    device_count_is_limit: bool = False
    """Whether a larger number of devices than :meth:`auto_device_count` is an error."""

    @property
    def autocast_device_type(self) -> str:
        """The ``device_type`` for ``torch.autocast``."""
        return self.first_device.type

    @property
    def process_group_backend(self) -> str:
        """The backend of ``torch.distributed`` for these devices. The default is torch's choice for the device type."""
        return torch.distributed.get_default_backend_for_device(self.first_device)

    @cached_property
    def first_device(self) -> torch.device:
        """A device of this kind, from which drivetrain reads the device type. drivetrain sets this attribute to a
        device that the run uses.
        """
        return self.get_parallel_devices([0])[0]

    @classmethod
    def why_unavailable(cls) -> str:
        """Return the reason why this accelerator is not available, in one line."""
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
        """Return a recorder of graphs on ``device``, for ``Trainer(cuda_graphs=...)``. Return ``None`` if devices of
        this kind have no graphs.

        Raises:
            RuntimeError: torch cannot record graphs on this device. The message gives the reason.
        """
        return None

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work queued on ``device`` is done."""
        if _is_torchs(device):
            torch.accelerator.synchronize(device)

    def memory_allocated(self, device: torch.device) -> int | None:
        """Return the number of bytes that tensors use on the device, or ``None`` if the number is unknown."""
        return torch.accelerator.memory_allocated(device) if _is_torchs(device) else None

    def max_memory_allocated(self, device: torch.device) -> int | None:
        """Return the peak of :meth:`memory_allocated` since :meth:`reset_peak_memory`, or ``None`` if the peak is
        unknown.
        """
        return torch.accelerator.max_memory_allocated(device) if _is_torchs(device) else None

    def reset_peak_memory(self, device: torch.device) -> None:
        """Reset the peak that :meth:`max_memory_allocated` returns."""
        if _is_torchs(device):
            torch.accelerator.reset_peak_memory_stats(device)

    def total_memory(self, device: torch.device) -> int | None:
        """Return the size of the device's memory in bytes, or ``None`` if the size is unknown."""
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
        """Return the sorted names for lists and messages. The valid name "fake", for simulated devices in tests, is
        left out.
        """
        return [name for name in super().available() if name != _SIMULATED or name in self._registered]

    def other_names(self, name: str) -> list[str]:
        """Return the other names of the accelerator: names that are registered for the same class and the same
        arguments. No class is imported.
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
"""The accelerators by name: drivetrain's own, the users', and those of installed packages."""


def _is_torchs(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type
