"""What becomes ``torch.lab``: the Python side of the device.

Most of it is ``torch.accelerator`` under the names by which programs know it from ``torch.cuda``. torch itself asks for
some of them: to seed (``manual_seed_all``, ``_is_in_bad_fork``), to save random state around activation checkpoints
(``_initialized``, ``device``, ``get_rng_state``, ``set_rng_state``), to load files (``is_available``,
``device_count``), for autocast (``get_amp_supported_dtype``), and when it is used first (``_lazy_init``).
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Event, Stream, Tensor
from torch.accelerator import current_device_index as current_device
from torch.accelerator import (
    current_stream,
    empty_cache,
    max_memory_allocated,
    memory_allocated,
    memory_stats,
    reset_peak_memory_stats,
    set_stream,
    synchronize,
)

__all__ = [
    "Event", "Stream", "counters", "current_device", "current_stream", "default_generators", "device", "device_count",
    "empty_cache", "get_amp_supported_dtype", "get_device_properties", "get_rng_state", "initial_seed", "is_available",
    "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated", "mem_get_info", "memory_allocated",
    "memory_stats", "reset_counters", "reset_peak_memory_stats", "seed", "seed_all", "set_device", "set_rng_state",
    "set_stream", "stream", "synchronize", "waits",
]  # fmt: skip

Device = torch.device | str | int | None
"""One of lab's devices; ``None``, or a device without an index, means the current one."""


def _index(device: Device) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "lab":
            raise ValueError(f'{str(device)!r} is no device of lab. Write "lab:0" or "lab:1".')
        device = device.index
    return current_device() if device is None else device


# ---- devices and streams ---------------------------------------------------------------------------------------------

_initialized = True  # nothing is put off until the first use


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Called before the first tensor is made; until then, and without it, synchronize() would wait for nothing."""


def device_count() -> int:
    """How many devices there are; ``torch.accelerator.device_count`` asks here."""
    return int(torch.ops.lab.device_count())


def is_available() -> bool:
    """Whether there is any; ``torch.accelerator.is_available`` asks here."""
    return device_count() > 0


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that used the device, and cannot use it; lab can."""
    return False


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of a device."""
    total = int(torch.ops.lab.capacity())
    return total - memory_allocated(_index(device)), total


class Properties(NamedTuple):
    """What is the same of a device as long as it lives; memory in bytes."""

    name: str
    total_memory: int


def get_device_properties(device: Device = None) -> Properties:
    index = _index(device)
    return Properties(f"lab {index}", mem_get_info(index)[1])


def set_device(device: Device) -> None:
    """Make ``device`` this thread's current one."""
    torch.accelerator.set_device_index(_index(device))


class device(torch.accelerator.device_index):
    """A context in which ``device`` is the current one."""

    def __init__(self, device: Device) -> None:
        super().__init__(_index(device))


def stream(stream: Stream) -> Stream:
    """A context in which ``stream`` is the current one: torch's streams are that themselves."""
    return stream


# ---- random numbers --------------------------------------------------------------------------------------------------

default_generators: tuple[torch.Generator, ...] = tuple(
    torch.ops.lab.default_generator(index) for index in range(device_count())
)
"""What draws on each device where no generator is given."""


def get_rng_state(device: Device = None) -> Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: Tensor, device: Device = None) -> None:
    default_generators[_index(device)].set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator; ``torch.manual_seed`` calls this."""
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> None:
    """Seed the current device's generator with a number that nobody knows beforehand."""
    default_generators[current_device()].seed()


def seed_all() -> None:
    """Seed every device's generator with one number that nobody knows beforehand."""
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return default_generators[current_device()].initial_seed()


# ---- autocast --------------------------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ---- what a program did ----------------------------------------------------------------------------------------------

_COUNTERS = (
    "scalar_reads", "shape_reads", "to_host", "to_host_async", "to_device", "to_device_async", "between_devices",
    "synchronizations",
)  # fmt: skip


def counters() -> dict[str, int]:
    """What the program has done since the start, or since :func:`reset_counters`; what operators do is left out.

    - ``scalar_reads``: values taken to the host, by ``item()``, ``float(tensor)``, ``if tensor:``;
    - ``shape_reads``: results whose size or kind depends on values: ``x[mask]``, ``nonzero()``, ``torch.equal()``;
    - ``to_host``, ``to_device``, ``between_devices``: copies; ``..._async``: those with ``non_blocking=True``;
    - ``synchronizations``: of a device, a stream or an event.
    """
    return dict(zip(_COUNTERS, torch.ops.lab.counters(), strict=True))


def reset_counters() -> None:
    """Let all counters start from zero."""
    torch.ops.lab.reset_counters()


def waits() -> int:
    """How often the program stood still until the device had computed what it wanted to know."""
    count = counters()
    return count["scalar_reads"] + count["shape_reads"] + count["to_host"] + count["synchronizations"]


# ---- the end of the process ------------------------------------------------------------------------------------------


# Backward passes on a device run in a thread of autograd's. loss.backward() returns when the gradients are there, and
# the thread lets go of the pass a moment later. Since torch 2.13 a pass holds a Python object, so the thread needs
# Python's lock for that; and if the main thread has begun to end the interpreter in that moment, the process aborts
# ("terminate called without an active exception"). It takes a program whose last act is a backward pass, on any
# device. So before the interpreter ends, each thread gets one more pass, without Python objects: when it has done that,
# it has let go of all others.
@atexit.register
def _finish_backward() -> None:
    with suppress(RuntimeError):  # a fork of a process that has used autograd has no threads, and may not start any
        torch.ops.lab.finish_backward()
