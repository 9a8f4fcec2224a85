"""Whatever torch was built for, on a made-up machine: torch's own functions are replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.accelerators import AcceleratorRegistry, TorchDeviceAccelerator, torch_device
from drivetrain.errors import ConfigurationError, UnknownNameError


class Machine:
    """What torch says about its accelerator, and what it was told to do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kind: str | None = "cuda"
        self.current: list[Any] = []
        self.module: Any = SimpleNamespace(device_count=lambda: 4, is_available=lambda: True)
        fakes = {
            "current_accelerator": lambda: None if self.kind is None else torch.device(self.kind),
            "set_device_index": self.current.append,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.accelerator, name, fake)
        patch.setattr(torch, "get_device_module", lambda device: self.module)


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
    with pytest.raises(ConfigurationError, match=rf"means the devices {named}, but this machine has 4, numbered"):
        TorchDeviceAccelerator.parse_devices(devices)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("devices", ["", ",", "all", "cuda:0", "0;1", "1.5", "0,x"])
def test_s0_12_a_text_without_numbers(devices: str) -> None:
    with pytest.raises(ConfigurationError, match=f"devices='{devices}' is no list of device numbers"):
        TorchDeviceAccelerator.parse_devices(devices)


def test_s0_4_s0_5_counting_and_availability_are_torchs(machine: Machine) -> None:
    assert TorchDeviceAccelerator.auto_device_count() == 4
    assert TorchDeviceAccelerator.is_available()
    machine.module.device_count = lambda: 0
    assert TorchDeviceAccelerator.auto_device_count() == 0
    assert not TorchDeviceAccelerator.is_available()
    machine.kind = None
    assert not TorchDeviceAccelerator.is_available()


def test_without_an_accelerator_the_cure_is_named(machine: Machine) -> None:
    machine.kind = None
    with pytest.raises(ConfigurationError, match='sees no accelerator. Write accelerator="cpu"'):
        TorchDeviceAccelerator.device_type()


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia", "privateuseone"])
def test_no_backend_is_special(machine: Machine, kind: str) -> None:
    machine.kind = kind
    accelerator = TorchDeviceAccelerator()
    assert accelerator.name == accelerator.autocast_device_type == kind
    assert accelerator.get_parallel_devices([1]) == [torch.device(kind, 1)]


@pytest.mark.parametrize("name", ["xpu", "hpu", "mtia", "ipu"])
def test_every_device_type_of_torchs_has_an_accelerator_by_its_name(name: str) -> None:
    accelerator = AcceleratorRegistry.get(name)
    assert accelerator.name == name
    assert type(accelerator) is type(AcceleratorRegistry.get(name))
    assert accelerator.get_parallel_devices([1]) == [torch.device(name, 1)]
    assert not accelerator.is_available()


@pytest.mark.parametrize("name", ["meta", "privateuseone", "quantum", "QUANTUM"])
def test_what_computes_nothing_has_none(name: str) -> None:
    with pytest.raises(UnknownNameError, match=f"no accelerator called '{name}'"):
        AcceleratorRegistry.get(name)


def test_a_name_may_be_in_capitals() -> None:
    assert type(AcceleratorRegistry.get("CPU")) is type(AcceleratorRegistry.get("cpu"))


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl"), ("mps", "gloo")])
def test_the_backend_of_a_process_group_is_torchs_choice(machine: Machine, kind: str, backend: str) -> None:
    machine.kind = kind
    assert TorchDeviceAccelerator().process_group_backend == backend


def test_s0_7_setup_device_makes_it_current(machine: Machine) -> None:
    TorchDeviceAccelerator().setup_device(torch.device("cuda", 2))
    assert machine.current == [torch.device("cuda", 2)]


def test_s0_6_stats_are_the_allocators(machine: Machine) -> None:
    device = torch.device("cuda", 1)
    assert TorchDeviceAccelerator().get_device_stats(device) == {}  # a backend without such counters
    machine.module.memory_stats = lambda of: {"allocated": 3, "on": of.index}
    assert TorchDeviceAccelerator().get_device_stats(device) == {"allocated": 3.0, "on": 1.0}


def test_s0_7_teardown_frees_the_cache_if_there_is_one(machine: Machine) -> None:
    TorchDeviceAccelerator().teardown()
    emptied: list[str] = []
    machine.module.empty_cache = lambda: emptied.append("cache")
    TorchDeviceAccelerator().teardown()
    assert emptied == ["cache"]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("devices", [1.5, ["a"], None, [0.0], "--1"])
def test_s0_12_what_is_no_device_number(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no list of device numbers"):
        TorchDeviceAccelerator.parse_devices(devices)


def test_s0_6_figures_that_are_no_numbers_are_left_out(machine: Machine) -> None:
    machine.module.memory_stats = lambda of: {"allocated": 3, "pools": {"small": 1}}
    assert TorchDeviceAccelerator().get_device_stats(torch.device("mtia", 0)) == {"allocated": 3.0}


def test_a_backend_from_outside_torch_is_known_once_its_package_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_device.known_types()
    with pytest.raises(UnknownNameError):
        AcceleratorRegistry.get("lab")
    monkeypatch.setattr(torch_device, "known_types", lambda: (*before, "lab"))  # its import renames torch's own
    assert AcceleratorRegistry.get("lab").name == "lab"


def test_what_torch_has_retired_is_not_offered() -> None:
    known = torch_device.known_types()
    assert {"xpu", "hpu", "mtia"} <= set(known)
    for name in known:
        torch.device(name)  # a retired one would warn, which is an error here
    assert not {"mkldnn", "opengl", "cpu", "meta", "hip"} & set(known)
