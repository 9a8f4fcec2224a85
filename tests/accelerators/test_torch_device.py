"""Whatever torch was built for, on a made-up machine: torch's own functions are replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.accelerators import TorchDeviceAccelerator
from drivetrain.errors import ConfigurationError


class Machine:
    """What torch says about its accelerator, and what it was told to do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kind: str | None = "cuda"
        self.count = 4
        self.current: list[Any] = []
        self.asked: list[Any] = []
        self.module: Any = SimpleNamespace()
        fakes = {
            "current_accelerator": lambda: None if self.kind is None else torch.device(self.kind),
            "device_count": lambda: self.count,
            "is_available": lambda: self.kind is not None,
            "set_device_index": self.current.append,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.accelerator, name, fake)
        patch.setattr(torch, "get_device_module", self._module_of)

    def _module_of(self, device: Any) -> Any:
        self.asked.append(device)
        return self.module


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (-1, [0, 1, 2, 3]),
        ("1", [0]), ("3", [0, 1, 2]), ("-1", [0, 1, 2, 3]),
        ([2], [2]), ([3, 1], [3, 1]), ((0, 2), [0, 2]),
        ("2,", [2]), ("3,1", [3, 1]), (" 0 , 2 ", [0, 2]),
    ],
)  # fmt: skip
def test_s0_12_parse_rules(devices: Any, indices: list[int]) -> None:
    assert TorchDeviceAccelerator.parse_devices(devices) == indices
    assert TorchDeviceAccelerator.get_parallel_devices(indices) == [torch.device("cuda", i) for i in indices]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("devices", "named"),
    [
        (0, r"\[\]"), (-2, r"\[\]"), ([], r"\[\]"),
        (5, r"\[0, 1, 2, 3, 4\]"), ([4], r"\[4\]"), ("4,", r"\[4\]"), ([-1], r"\[-1\]"), ("0,-1", r"\[0, -1\]"),
        ([1, 1], r"\[1, 1\]"), ("1,1", r"\[1, 1\]"),
    ],
)  # fmt: skip
def test_s0_12_devices_that_are_not_there(devices: Any, named: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"devices names {named}, but this machine has 4 device\(s\), numbered"
    ):
        TorchDeviceAccelerator.parse_devices(devices)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("devices", ["", ",", "all", "cuda:0", "0;1", "1.5", "0,x"])
def test_s0_12_a_text_without_numbers(devices: str) -> None:
    with pytest.raises(ConfigurationError, match=f"devices='{devices}' is no list of device numbers"):
        TorchDeviceAccelerator.parse_devices(devices)


def test_s0_4_s0_5_counting_and_availability_are_torchs(machine: Machine) -> None:
    assert TorchDeviceAccelerator.auto_device_count() == 4
    assert TorchDeviceAccelerator.is_available()
    machine.count, machine.kind = 1, None
    assert TorchDeviceAccelerator.auto_device_count() == 1
    assert not TorchDeviceAccelerator.is_available()


def test_without_an_accelerator_the_cure_is_named(machine: Machine) -> None:
    machine.kind = None
    with pytest.raises(ConfigurationError, match='sees no accelerator. Write accelerator="cpu"'):
        TorchDeviceAccelerator.device_type()


@pytest.mark.parametrize(("kind", "float64"), [("cuda", True), ("xpu", True), ("mps", False), ("privateuseone", True)])
def test_no_backend_is_special_but_for_float64(machine: Machine, kind: str, float64: bool) -> None:
    machine.kind = kind
    accelerator = TorchDeviceAccelerator()
    assert accelerator.name == accelerator.autocast_device_type == kind
    assert accelerator.supports_float64 is float64
    assert accelerator.get_parallel_devices([1]) == [torch.device(kind, 1)]


def test_s0_7_setup_device_makes_it_current(machine: Machine) -> None:
    TorchDeviceAccelerator().setup_device(torch.device("cuda", 2))
    assert machine.current == [torch.device("cuda", 2)]


def test_s0_6_stats_are_the_allocators(machine: Machine) -> None:
    device = torch.device("cuda", 1)
    assert TorchDeviceAccelerator().get_device_stats(device) == {}  # a backend without such counters
    machine.module = SimpleNamespace(memory_stats=lambda of: {"allocated": 3, "on": of.index})
    assert TorchDeviceAccelerator().get_device_stats(device) == {"allocated": 3.0, "on": 1.0}
    assert machine.asked == [device, device]


def test_s0_7_teardown_frees_the_cache_if_there_is_one(machine: Machine) -> None:
    TorchDeviceAccelerator().teardown()
    emptied: list[str] = []
    machine.module = SimpleNamespace(empty_cache=lambda: emptied.append("cache"))
    TorchDeviceAccelerator().teardown()
    assert emptied == ["cache"]
    assert machine.asked == ["cuda", "cuda"]


@pytest.mark.parametrize("devices", [1.5, ["a"], None, [0.0], "--1"])
def test_s0_12_what_is_no_device_number(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no list of device numbers"):
        TorchDeviceAccelerator.parse_devices(devices)
