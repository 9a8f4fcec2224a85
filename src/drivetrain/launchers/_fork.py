"""Check that forks of this process can compute. A fork has a copy of this process's memory, but no copy of its threads
and devices.
"""

from __future__ import annotations

import os

import torch
import torch.multiprocessing

from drivetrain.errors import ConfigurationError

# The time limit in seconds for one operation in a forked process. The operation takes milliseconds. If the process
# lacks threads that torch needs, the operation never ends.
_PROBE_S = 10.0
_CURE = 'Use start_method="spawn" or "forkserver", or launch before anything is computed in this process.'


def check_fork(threads: int | None) -> None:
    """Check that a forked process can compute.

    Args:
        threads: the number of torch's threads in forked processes. ``None``: the number in this process.

    Raises:
        ConfigurationError: a forked process cannot compute.
    """
    current = torch.accelerator.current_accelerator()
    if current is not None and getattr(torch.get_device_module(current), "is_initialized", bool)():
        raise ConfigurationError(
            f'start_method="fork" copies this process, but torch has already used its {current.type} device here, '
            f"which a copy cannot. {_CURE} [DT1053]"
        )
    probe = torch.multiprocessing.get_context("fork").Process(target=_compute, args=(threads,), daemon=True)
    probe.start()
    probe.join(_PROBE_S)
    code = probe.exitcode
    if code is None:
        probe.kill()
        probe.join()
    if code != 0:
        how = f"did not end within {_PROBE_S:g} s" if code is None else f"ended with exit code {code}"
        raise ConfigurationError(
            f'start_method="fork" copies this process, but a parallel torch operation in a copy {how}: torch has '
            f"already started its threads here, which a copy does not have. {_CURE}"
        )


def _compute(threads: int | None) -> None:
    """Run an operation that is large enough for torch to use several threads."""
    if threads is not None:
        torch.set_num_threads(threads)
    x = torch.ones(512, 512, requires_grad=True)
    torch.autograd.backward((x @ x + 1).sum())
    os._exit(0)
