"""The CPU: one device, and how many processes a user may ask for (spec S0-12)."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from drivetrain.accelerators import CPUAccelerator
from drivetrain.errors import ConfigurationError


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (4, 4), ("1", 1), ("4", 4)])
def test_s0_12_a_positive_count(devices: Any, count: int) -> None:
    assert CPUAccelerator.parse_devices(devices) == count
    assert CPUAccelerator.get_parallel_devices(count) == [torch.device("cpu")] * count


@pytest.mark.parametrize("devices", [0, -1, "0", "-1", "0,1", [0, 1], [0], None, 1.0, True, "auto", ""])
def test_s0_12_anything_else_is_refused(devices: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"number of processes of at least 1, not .*\. Write devices="
    ) as caught:
        CPUAccelerator.parse_devices(devices)
    assert repr(devices) in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "count"), [([0, 1], 2), ((0, 1, 2), 3), ("0,1", 2), ([0], 1), (0, 1), ("auto", 1), ("", 1)]
)
def test_numbers_of_devices_are_answered_with_as_many_processes(devices: Any, count: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"Write devices={count}\.$"):
        CPUAccelerator.parse_devices(devices)


def test_s0_3_indices_become_devices() -> None:
    assert CPUAccelerator.get_parallel_devices([0, 1]) == [torch.device("cpu")] * 2


def test_s0_4_auto_is_one_and_not_the_cores() -> None:
    assert CPUAccelerator.auto_device_count() == 1
    assert CPUAccelerator.is_available() is True


def test_s0_6_stats_are_percentages() -> None:
    stats = CPUAccelerator().get_device_stats(torch.device("cpu"))
    assert set(stats) == {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}
    assert all(isinstance(value, float) and 0.0 <= value <= 100.0 for value in stats.values())


def test_what_it_says_of_itself() -> None:
    accelerator = CPUAccelerator()
    assert accelerator.name == "cpu"
    assert accelerator.autocast_device_type == "cpu"
    assert accelerator.supports_float64


def test_c1_nobody_counts_what_tensors_take_on_the_host() -> None:
    accelerator, host = CPUAccelerator(), torch.device("cpu")
    accelerator.setup_device(host)
    accelerator.synchronize(host)
    accelerator.reset_peak_memory(host)
    accelerator.teardown()
    assert accelerator.memory_allocated(host) is None
    assert accelerator.max_memory_allocated(host) is None
    assert accelerator.process_group_backend == "gloo"


def test_the_hosts_memory_in_bytes() -> None:
    total = CPUAccelerator().total_memory(torch.device("cpu"))
    assert total == psutil.virtual_memory().total
    assert type(total) is int
