"""Checks whether files in the working directory and the temporary folder survive a crash, and how fast they are
written.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from drivetrain.base import files
from drivetrain.base.packages import psutil
from drivetrain.doctor.checks import NOTE, Finding, Items

_MIB, _GIB = 1 << 20, 1 << 30
_WRITTEN, _REPEATS = 16, 5  # the large file's size in MiB, and how many small files
_SLOWEST_MIB_S, _LONGEST_S = 20, 0.5


def check() -> Items:
    """Write, flush, rename and read a large file and small files, as when a checkpoint is saved."""
    yield from _folder("The working directory", os.getcwd(), keeps=True)
    yield from _folder("The temporary folder", tempfile.gettempdir(), keeps=False)


def _folder(what: str, folder: str, keeps: bool) -> Items:
    path, block = files.temporary_beside(Path(folder, "probe")), os.urandom(_MIB)
    small = []
    try:
        for _ in range(_REPEATS):
            started = time.perf_counter()
            with files.replacing(path, durable=True) as stream:
                stream.write(b"0")
            small.append(time.perf_counter() - started)
        started = time.perf_counter()
        with files.replacing(path, durable=True) as stream:
            for _ in range(_WRITTEN):
                stream.write(block)
        rate = _WRITTEN / (time.perf_counter() - started)
        is_intact = path.read_bytes() == block * _WRITTEN
        free, kind = shutil.disk_usage(folder).free, _file_system(folder)
    except OSError as error:
        yield Finding(
            f"{what} {folder} cannot be written durably: {error.strerror or error}.",
            "A checkpoint there cannot be saved." if keeps else "Jobs with several processes fail, and many libraries.",
            f"{'Trainer(default_root_dir=...)' if keeps else 'TMPDIR=...'} with a folder on another disk.",
        )  # fmt: skip
        return
    finally:
        path.unlink(missing_ok=True)
    latency = statistics.median(small)
    yield f"{what.lower().removeprefix('the ')} {rate:.0f} MiB/s, a durable small file in {latency * 1e3:.1f} ms"
    if not is_intact:
        yield Finding(
            f"{what} {folder} returns other bytes than were written.", "Checkpoints there are damaged.",
            "drivetrain checkpoint verify on those that exist, and use another disk.",
        )  # fmt: skip
    if rate < _SLOWEST_MIB_S or latency > _LONGEST_S:
        yield Finding(
            f"{what} {folder} is slow: {rate:.1f} MiB/s, and {latency:.2f} s for a durable small file.",
            "Training waits for each checkpoint.",
            "a folder on a local disk, or Trainer(plugins=[AsyncCheckpointIO()]), which saves during training.",
            NOTE,
        )  # fmt: skip
    if free < _GIB:
        yield Finding(
            f"{what} {folder} has {free / _MIB:.0f} MiB free.", "A save fails when the disk is full.",
            "ModelCheckpoint(save_top_k=1), or drivetrain checkpoint prune.", NOTE,
        )  # fmt: skip
    if keeps and kind in ("tmpfs", "ramfs"):
        yield Finding(
            f"{what} {folder} is in memory ({kind}).", "A restart of the machine removes checkpoints there.",
            "Trainer(default_root_dir=...) with a folder on a disk.", NOTE,
        )  # fmt: skip


def _file_system(folder: str) -> str:
    """Return the type of the file system at ``folder``; "" if the type is unknown."""
    real = os.path.realpath(folder)
    mounts = [each for each in psutil.disk_partitions(all=True) if Path(real).is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
