"""Checks limits of the system that a training may reach: shared memory, open files, processes, locked memory, cores."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from drivetrain.base.packages import psutil, resource
from drivetrain.doctor.checks import NOTE, Finding, Items

SHARED_MEMORY, CPU_QUOTA, INFINIBAND = "/dev/shm", "/sys/fs/cgroup/cpu.max", "/sys/class/infiniband"

_MIB, _GIB = 1 << 20, 1 << 30
_FEWEST_FILES, _FEWEST_PROCESSES, _LEAST_LOCKED = 1024, 2048, 64 * _MIB


def check() -> Items:
    """Compare the limits with what DataLoader workers, processes and devices usually need."""
    yield from _shared_memory()
    if os.name == "posix":
        yield from _limits()
    yield from _cores()


def _shared_memory() -> Items:
    if not os.path.isdir(SHARED_MEMORY):  # only Linux has this folder
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    yield f"shared memory {size / _GIB:.2f} GiB"
    if size < _GIB:
        yield Finding(
            f"{SHARED_MEMORY} has {size / _MIB:.0f} MiB.",
            "A DataLoader's workers pass batches through it, and are killed by a bus error when it is full.",
            "docker run --shm-size=8g or --ipc=host; else DataLoader(num_workers=0).", NOTE,
        )  # fmt: skip
    if not os.access(SHARED_MEMORY, os.W_OK):
        yield Finding(
            f"{SHARED_MEMORY} cannot be written.", "A DataLoader with workers fails.",
            'torch.multiprocessing.set_sharing_strategy("file_system") and TMPDIR in a folder of yours.',
        )  # fmt: skip


def _limits() -> Items:
    for name, lowest, what, so_what, write in (
        ("RLIMIT_NOFILE", _FEWEST_FILES, "open files",
         'Each tensor of a batch from a worker, and each socket, is an open file: "Too many open files" ends a run.',
         "ulimit -n 65536, in the shell that starts the program."),
        ("RLIMIT_NPROC", _FEWEST_PROCESSES, "processes and threads of this user",
         "Ranks and workers start threads, and fail with \"Resource temporarily unavailable\".",
         "ulimit -u 65536, or fewer workers."),
        ("RLIMIT_FSIZE", _GIB, "bytes in a file", "A checkpoint that is larger cannot be written.",
         "ulimit -f unlimited, in the shell that starts the program."),
    ):  # fmt: skip
        if (limit := _soft(name)) is not None and limit < lowest:
            yield Finding(f"The limit of {what} is {limit}.", so_what, write, NOTE)
    yield f"open files {_soft('RLIMIT_NOFILE') or 'unlimited'}"
    locked = _soft("RLIMIT_MEMLOCK")
    if locked is not None and locked < _LEAST_LOCKED and os.path.isdir(INFINIBAND):
        yield Finding(
            f"The limit of locked memory is {locked} bytes, and there is an InfiniBand adapter.",
            "The adapter locks the memory that it sends: connections between machines fail or use TCP.",
            "ulimit -l unlimited; in a container, --ulimit memlock=-1.", NOTE,
        )  # fmt: skip


def _soft(name: str) -> int | None:
    """Return the soft limit; ``None`` if there is no limit."""
    number = getattr(resource, name, None)
    soft = resource.RLIM_INFINITY if number is None else resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _cores() -> Items:
    visible = psutil.cpu_count() or 1
    usable = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(visible)
    if os.path.isfile(CPU_QUOTA):
        quota, _, period = Path(CPU_QUOTA).read_text().partition(" ")
        usable = usable if quota == "max" else min(usable, int(quota) / int(period))
    yield f"{usable:g} of {visible} cores"
    if usable < visible and "OMP_NUM_THREADS" not in os.environ:
        yield Finding(
            f"The machine has {visible} cores, and this process may use {usable:g} of them.",
            "A library that starts a thread for each core of the machine is slowed down by its own threads.",
            f"export OMP_NUM_THREADS={max(1, int(usable))}", NOTE,
        )  # fmt: skip
