"""CUDA on a made-up machine: torch's functions and NVIDIA's library are replaced."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.accelerators import AcceleratorRegistry, CUDAAccelerator, find_usable_cuda_devices
from drivetrain.errors import ConfigurationError

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them, as torch speaks of them."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated": 3, "on": device.index})
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda device: SimpleNamespace(total_memory=80 + device.index, uuid=f"of-{device.index}"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed, unless the test says so


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (1, [0]), (4, [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), ("2", [0, 1]), ("-1", [0, 1, 2, 3]),
        ([3, 1], [3, 1]), ((2,), [2]), ("3,1", [3, 1]), ("2,", [2]),
    ],
)  # fmt: skip
def test_s0_12_devices_are_unique_and_exist(devices: Any, indices: list[int]) -> None:
    assert CUDAAccelerator.parse_devices(devices) == indices
    assert CUDAAccelerator.get_parallel_devices(indices) == [torch.device("cuda", index) for index in indices]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("devices", [5, [4], "4,", [1, 1], "1,1", [-1], [], True, 1.0, "all", None])
def test_s0_12_anything_else_is_refused(devices: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        CUDAAccelerator.parse_devices(devices)
    assert f"devices={devices!r}" in str(caught.value)


@pytest.mark.usefixtures("gpus")
def test_s0_4_s0_5_what_torch_counts() -> None:
    accelerator = AcceleratorRegistry.get("cuda")
    assert type(accelerator) is CUDAAccelerator
    assert accelerator.auto_device_count() == 4
    assert accelerator.is_available()
    assert accelerator.name == accelerator.autocast_device_type == "cuda"
    assert accelerator.process_group_backend == "nccl"
    assert accelerator.total_memory(DEVICE) == 81


@pytest.mark.parametrize(
    ("built", "why"),
    [
        ((None, None), "this build of torch has no CUDA"),
        (("13.0", None), "torch.cuda sees no device: look at the driver and at CUDA_VISIBLE_DEVICES"),
        ((None, "7.0"), "torch.cuda sees no device: look at the driver and at CUDA_VISIBLE_DEVICES"),
    ],
)
def test_s0_5_why_there_is_none(built: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", built[0])
    monkeypatch.setattr(torch.version, "hip", built[1], raising=False)
    assert not CUDAAccelerator.is_available()
    assert CUDAAccelerator.why_unavailable() == why


@pytest.mark.usefixtures("gpus")
def test_gpus_are_numbered_as_nvidia_smi_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    with caplog.at_level("INFO", logger="drivetrain"):
        CUDAAccelerator.set_nvidia_flags(2)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        CUDAAccelerator.set_nvidia_flags(local_rank=0)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert caplog.messages == [
        "Local rank 2 sees the CUDA devices [0,1,2,3].",
        "Local rank 0 sees the CUDA devices [3,1].",
    ]


# ---- figures ---------------------------------------------------------------------------------------------------------


class NVML(ModuleType):
    """NVIDIA's library on this machine; it fails where ``broken`` says so."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, broken: str | None = None) -> None:
        super().__init__("pynvml")
        self.broken = broken
        self.handles: list[str] = []

    def _answer(self, name: str, value: Any) -> Any:
        if name == self.broken:
            raise self.NVMLError(name)
        return value

    def nvmlInit(self) -> None:
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.handles.append(uuid)
        return str(self._answer("handle", uuid))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer("utilization", SimpleNamespace(gpu=57))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return int(self._answer("power", 61_500))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return int(self._answer("temperature", 42))


ALLOCATOR = {"allocated": 3.0, "on": 1.0}
BOARD = {"utilization_percent": 57.0, "power_watts": 61.5, "temperature_celsius": 42.0}


@pytest.mark.usefixtures("gpus")
def test_s0_6_stats_without_nvidias_library() -> None:
    assert CUDAAccelerator().get_device_stats(DEVICE) == ALLOCATOR


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("broken", "left_out"),
    [
        (None, []), ("init", list(BOARD)), ("handle", list(BOARD)),
        ("utilization", ["utilization_percent"]), ("power", ["power_watts"]), ("temperature", ["temperature_celsius"]),
    ],
)  # fmt: skip
def test_s0_6_stats_with_it(broken: str | None, left_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    library = NVML(broken)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    stats = CUDAAccelerator().get_device_stats(DEVICE)
    assert stats == {**ALLOCATOR, **{name: value for name, value in BOARD.items() if name not in left_out}}
    assert all(type(value) is float for value in stats.values())
    # the board is found by its UUID, since NVML's own numbers know nothing of CUDA_VISIBLE_DEVICES
    assert library.handles == ([] if broken == "init" else ["GPU-of-1"])


# ---- devices that can be used now ------------------------------------------------------------------------------------


@pytest.fixture
def busy(gpus: None, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The devices on which no tensor can be made: 0 and 2."""
    taken, empty = {0, 2}, torch.empty

    def fake(*size: Any, device: torch.device) -> torch.Tensor:
        if device.index in taken:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return empty(*size)

    monkeypatch.setattr(torch, "empty", fake)
    return taken


@pytest.mark.parametrize(("asked", "found"), [(0, []), (1, [1]), (2, [1, 3]), (-1, [1, 3])])
def test_find_usable_cuda_devices(busy: set[int], asked: int, found: list[int]) -> None:
    assert find_usable_cuda_devices(asked) == found
    if asked == -1:
        assert find_usable_cuda_devices() == found


def test_find_usable_cuda_devices_says_how_many_there_are(busy: set[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"\(3\): of 4 CUDA devices, 2 can be used: \[1, 3\]. Ask for fewer"):
        find_usable_cuda_devices(3)
    busy |= {1, 3}
    with pytest.raises(ConfigurationError, match=r"\(-1\): of 4 CUDA devices, 0 can be used: \[\]."):
        find_usable_cuda_devices()
