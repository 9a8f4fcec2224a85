"""The accelerator for TPUs and the other devices that torch_xla supports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.accelerators.torch_device import as_numbers
from drivetrain.base.packages import torch_xla, xla_model, xla_runtime, xla_tpu
from drivetrain.errors import ConfigurationError

_KIB = 1024


class XLAAccelerator(Accelerator):
    """TPUs and other devices of torch_xla. The package torch_xla is imported on first use.

    ``accelerator="auto"`` can choose these devices, but not torch_xla's CPU devices, which are for tests. For CPU
    devices, write ``accelerator="xla"``.
    """

    _names = ("tpu", "xla")
    auto_priority = 400
    yields_to_torch = True  # torch may have its own device type "tpu"
    single_device_strategy, parallel_strategy, own_strategies_only = "single_xla", "xla", True
    device_count_is_limit = True

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Accept three selections. 1 means one device. -1 or the number of devices means all devices. ``[i]`` or
        ``"i,"`` means the single device with the number i, counted from 0.
        """
        given, devices = devices, as_numbers(devices)
        count = XLAAccelerator.auto_device_count()
        if type(devices) is int and devices in (1, count, -1):
            return count if devices == -1 else devices
        is_single = isinstance(devices, (list, tuple)) and len(devices) == 1 and type(devices[0]) is int
        if is_single and devices[0] in range(count):
            return list(devices)
        raise ConfigurationError(
            f"devices={given!r}: a job uses one XLA device, the first or another, or all {count} of this machine. "
            f"Write devices=1, devices={count} or devices=[0]."
        )

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("xla", index) for index in (range(devices) if isinstance(devices, int) else devices)]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices of this machine. This method does not start the runtime on a TPU.

        A TPU belongs to the process that has started the runtime on the TPU, so only the job's processes may start the
        runtime.
        """
        if not find_spec("torch_xla"):
            return 0

        if xla_runtime.is_spmd():  # in SPMD mode, one virtual device represents all devices
            return int(xla_runtime.addressable_runtime_device_count())
        if xla_runtime.device_type() == "TPU" and not torch_xla._XLAC._xla_runtime_is_initialized():
            return int(xla_tpu.num_available_devices())
        if xla_runtime.device_type() == "CPU":
            return int(os.environ.get("CPU_NUM_DEVICES", "1"))
        return int(xla_runtime.addressable_device_count())

    @classmethod
    def joins_auto(cls) -> bool:
        """Return whether torch_xla uses a device other than the CPU on this machine."""
        if os.environ.get("PJRT_DEVICE") == "CPU":
            return False  # this answer needs no import of torch_xla
        try:
            return bool(torch_xla.runtime.device_type() != "CPU")
        except (ImportError, OSError, RuntimeError):
            return True  # is_available() then returns False

    @staticmethod
    def is_available() -> bool:
        try:
            return XLAAccelerator.auto_device_count() > 0
        # the installed torch_xla does not work with this torch, or on this machine
        except (ImportError, OSError, RuntimeError):
            return False

    @classmethod
    def why_unavailable(cls) -> str:
        if not find_spec("torch_xla"):
            return "torch_xla is not installed"
        return "torch_xla sees no device, or was built for another torch"

    @property
    def name(self) -> str:
        return "tpu"

    @property
    def process_group_backend(self) -> str:
        return "xla"

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: torch_xla assigns a device to each process."""

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the memory in use and the peak of this memory, in KiB. If the runtime has no such figures, return an
        empty dictionary.
        """
        used, peak = self.memory_allocated(device), self.max_memory_allocated(device)
        figures = {"memory.used_kib": used, "memory.peak_kib": peak}
        return {name: value / _KIB for name, value in figures.items() if value is not None}

    def synchronize(self, device: torch.device) -> None:
        torch_xla.sync(wait=True)

    def memory_allocated(self, device: torch.device) -> int | None:
        return _memory(device, "bytes_used")

    def max_memory_allocated(self, device: torch.device) -> int | None:
        return _memory(device, "peak_bytes_used")

    def total_memory(self, device: torch.device) -> int | None:
        return _memory(device, "bytes_limit")


def _memory(device: torch.device, key: str) -> int | None:
    try:
        figure: int | None = xla_model.get_memory_info(device).get(key)
    except RuntimeError:  # some devices do not provide memory statistics
        return None
    return figure
