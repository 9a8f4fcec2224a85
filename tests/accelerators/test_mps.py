"""Apple's GPU on a made-up machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.accelerators import AcceleratorRegistry, MPSAccelerator
from drivetrain.errors import ConfigurationError
from drivetrain.plan import resolve
from drivetrain.settings import Settings

DEVICE = torch.device("mps", 0)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac, as torch speaks of it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 5)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 9)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 64)


@pytest.mark.parametrize("devices", [1, "1", -1, "-1", [0], (0,), "0,"])
def test_s0_12_there_is_one(devices: Any) -> None:
    assert MPSAccelerator.parse_devices(devices) == [0]
    assert MPSAccelerator.get_parallel_devices([0]) == [DEVICE]


@pytest.mark.parametrize("devices", [2, 0, "2", [1], "1,", [0, 0], [0, 1], "0,1", [], True, 1.0, [0.0], None, "all"])
def test_s0_12_and_no_other(devices: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MPSAccelerator.parse_devices(devices)
    assert f"devices={devices!r}" in str(caught.value)


def test_s0_4_s0_5_what_it_says_of_itself(mac: None) -> None:
    accelerator = AcceleratorRegistry.get("mps")
    assert type(accelerator) is MPSAccelerator
    assert accelerator.auto_device_count() == 1
    assert accelerator.is_available()
    assert accelerator.name == accelerator.autocast_device_type == "mps"
    assert not accelerator.supports_several_devices
    assert not accelerator.supports_non_blocking  # torch frees the source of a copy before the device has read it
    assert not accelerator.supports_pinned_memory
    accelerator.setup_device(DEVICE)  # nothing to choose, and torch.mps has no such function


@pytest.mark.parametrize(
    ("built", "why"), [(False, "this build of torch has no MPS"), (True, "it needs macOS 14 and Apple silicon")]
)
def test_s0_5_why_there_is_none(built: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    assert not MPSAccelerator.is_available()
    assert MPSAccelerator.why_unavailable() == why


def test_s0_6_stats_are_the_hosts_which_the_gpu_shares(mac: None) -> None:
    stats = MPSAccelerator().get_device_stats(DEVICE)
    assert set(stats) == {
        "M1_cpu_percent", "M1_vm_percent", "M1_swap_percent", "allocated_bytes", "driver_allocated_bytes",
    }  # fmt: skip
    assert all(type(value) is float for value in stats.values())
    assert all(0 <= value <= 100 for name, value in stats.items() if name.endswith("percent"))
    assert (stats["allocated_bytes"], stats["driver_allocated_bytes"]) == (5.0, 9.0)


def test_memory_is_counted_by_torch_mps(mac: None) -> None:
    accelerator = MPSAccelerator()
    assert accelerator.memory_allocated(DEVICE) == 5
    assert accelerator.max_memory_allocated(DEVICE) is None
    accelerator.reset_peak_memory(DEVICE)
    assert accelerator.total_memory(DEVICE) == 64


def test_there_are_no_64_bit_floats(mac: None) -> None:
    assert resolve(Settings(accelerator="mps")).devices == (DEVICE,)
    with pytest.raises(ConfigurationError, match="accelerator 'mps' has no 64-bit floats. Write precision=\"32-true\""):
        resolve(Settings(accelerator="mps", precision="64-true"))


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_find_unused_parameters_true"])
def test_ddp_is_refused_when_the_plan_is_made(mac: None, strategy: str) -> None:
    with pytest.raises(ConfigurationError, match="the accelerator 'mps' cannot exchange gradients"):
        Trainer(accelerator="mps", devices=1, strategy=strategy)
    assert Trainer(accelerator="mps", devices=1).plan.accelerator.name == "mps"
