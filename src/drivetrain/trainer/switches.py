"""Sets torch's process-wide switches for a run, and restores the former values afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch

from drivetrain.settings import Settings


@contextmanager
def torch_switches(settings: Settings, training: bool) -> Iterator[None]:
    """Context in which torch's switches have the values in ``settings``. Afterwards, they have their former values
    again.
    """
    with ExitStack() as stack:
        if settings.deterministic is not None:
            _use_deterministic(settings.deterministic, stack)
        benchmark = settings.benchmark
        if benchmark is None and settings.deterministic:
            benchmark = False  # a benchmark measures times, and would choose kernels that differ between runs
        if benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            # cudnn.flags() is not used: its default enabled=False would turn cuDNN off.
            torch.backends.cudnn.benchmark = benchmark
        if training:
            stack.enter_context(torch.set_grad_enabled(True))
            if settings.detect_anomaly:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield


def _use_deterministic(mode: bool | Literal["warn"], stack: ExitStack) -> None:
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch.use_deterministic_algorithms, before, warn_only=warns)
    torch.use_deterministic_algorithms(bool(mode), warn_only=mode == "warn")
    # cuBLAS reads this variable when it creates a handle. Without the variable, cuBLAS is not deterministic.
    if mode and (name := "CUBLAS_WORKSPACE_CONFIG") not in os.environ:
        os.environ[name] = ":4096:8"
        stack.callback(os.environ.pop, name, None)
