"""The functions beside the accelerators."""

from __future__ import annotations

import socket

import pytest
import torch

from drivetrain.accelerators import CUDAAccelerator
from drivetrain.compat import devices


def test_the_processor_tells_percentages() -> None:
    found = devices.get_cpu_stats()
    assert set(found) == {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}
    assert all(0 <= value <= 100 for value in found.values())


@pytest.mark.parametrize("count", [0, 2])
def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert (devices.num_cuda_devices(), devices.is_cuda_available()) == (count, count > 0)


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_gpu_is_asked_by_number_or_device(monkeypatch: pytest.MonkeyPatch, device: int | str | torch.device) -> None:
    monkeypatch.setattr(CUDAAccelerator, "get_device_stats", lambda self, place: {str(place): 1.0})
    assert devices.get_nvidia_gpu_stats(device) == {"cuda:1": 1.0}


def test_a_port_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STANDALONE_PORT", raising=False)
    with socket.socket() as taken:
        taken.bind(("", devices.find_free_network_port()))
        assert devices.find_free_network_port() != taken.getsockname()[1]
    monkeypatch.setenv("STANDALONE_PORT", "12345")
    assert devices.find_free_network_port() == 12345
