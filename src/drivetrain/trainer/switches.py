"""Set torch's process-wide switches for a run, and restore them afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch

from drivetrain.settings import Settings


@contextmanager
def torch_switches(settings: Settings, training: bool) -> Iterator[None]:
    """Context in which torch's switches are set as in the settings; they are restored afterwards."""
    with ExitStack() as stack:
        if settings.deterministic is not None:
            _use_deterministic(settings.deterministic, stack)
        benchmark = settings.benchmark
        if benchmark is None and settings.deterministic:
            benchmark = False  # benchmarking chooses algorithms by measured times, which is not deterministic
        if benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            # cudnn.flags() would also turn cuDNN off, by its default enabled=False
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
    # cuBLAS reads this variable when a handle is created, and is not deterministic without it
    if mode and (name := "CUBLAS_WORKSPACE_CONFIG") not in os.environ:
        os.environ[name] = ":4096:8"
        stack.callback(os.environ.pop, name, None)
