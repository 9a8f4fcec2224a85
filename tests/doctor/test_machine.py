"""Checks of the machine: each finds a seeded fault, and nothing on a machine without faults."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from drivetrain.base import files
from drivetrain.doctor import clock, disk, limits, versions
from drivetrain.doctor.checks import NOTE, WRONG, Finding, Items

GIB = 1 << 30


def found(items: Items) -> dict[str, str]:
    """The severity of each finding by what it says."""
    return {each.what: each.severity for each in items if isinstance(each, Finding)}


# ---- disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(disk, "_SLOWEST_MIB_S", 0)  # a loaded machine is no fault here
    monkeypatch.setattr(disk, "_LONGEST_S", 1e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * GIB, total=8 * GIB))
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [SimpleNamespace(mountpoint="/", fstype="ext4")])
    return tmp_path


def test_a_good_disk_has_two_facts_and_keeps_no_file(folders: Path) -> None:
    facts = list(disk.check())
    assert [str(fact).rpartition(" MiB/s")[0].rpartition(" ")[0] for fact in facts] == [
        "working directory", "temporary folder",
    ]  # fmt: skip
    assert list(folders.iterdir()) == []


def failing(number: int) -> Callable[..., None]:
    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fails


@pytest.mark.parametrize(
    ("call", "number", "said"), [("fsync", errno.EIO, "input/output error"), ("replace", errno.EROFS, "read-only")]
)
def test_a_flush_or_a_rename_that_fails_is_found(
    folders: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, said: str
) -> None:
    monkeypatch.setattr(files.os, call, failing(number))
    findings = found(disk.check())
    assert all("cannot be written durably" in what and said in what.lower() for what in findings)
    assert list(findings.values()) == [WRONG, WRONG]
    assert list(folders.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's device that is always full")
def test_a_full_disk_is_found(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files._Stream, "write", lambda *_: failing(errno.ENOSPC)())
    assert all("no space left on device" in what for what in found(disk.check()))


def test_bytes_that_change_on_the_way_are_found(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"others")
    assert {what.rpartition(" returns ")[2] for what in found(disk.check())} == {"other bytes than were written."}


def test_a_slow_a_nearly_full_and_a_volatile_disk_are_noted(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SLOWEST_MIB_S", 1e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=GIB // 2, total=8 * GIB))
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [SimpleNamespace(mountpoint="/", fstype="tmpfs")])
    findings = found(disk.check())
    assert set(findings.values()) == {NOTE}
    for said, count in (("is slow", 2), ("512 MiB free", 2), ("is in memory (tmpfs)", 1)):
        assert sum(said in what for what in findings) == count


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Limits that a test may change: by name of the resource, the shared memory, the quota."""
    given: dict[str, Any] = {"shm": 8 * GIB, "usable": 8}
    infinite = resource.RLIM_INFINITY
    names = {
        getattr(resource, name): name
        for name in vars(resource)
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
    }
    monkeypatch.setattr(resource, "getrlimit", lambda number: (given.get(names[number], infinite), infinite))
    monkeypatch.setattr(limits, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(limits, "INFINIBAND", str(tmp_path))
    monkeypatch.setattr(limits, "CPU_QUOTA", str(tmp_path / "cpu.max"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=given["shm"]))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(given["usable"])), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return given


def test_a_machine_without_tight_limits_has_facts_only(machine: dict[str, Any]) -> None:
    assert list(limits.check()) == ["shared memory 8.00 GiB", "open files unlimited", "8 of 8 cores"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("shm", 64 << 20, "has 64 MiB"), ("RLIMIT_NOFILE", 256, "The limit of open files is 256."),
        ("RLIMIT_NPROC", 100, "processes and threads of this user is 100"),
        ("RLIMIT_FSIZE", 1 << 20, "bytes in a file is 1048576"), ("RLIMIT_MEMLOCK", 65536, "locked memory is 65536"),
        ("usable", 2, "has 8 cores, and this process may use 2"),
    ],
)  # fmt: skip
def test_a_tight_limit_is_noted(machine: dict[str, Any], name: str, value: int, said: str) -> None:
    machine[name] = value
    [(what, severity)] = found(limits.check()).items()
    assert said in what
    assert severity == NOTE


def test_a_quota_of_a_container_is_noted(machine: dict[str, Any]) -> None:
    Path(limits.CPU_QUOTA).write_text("max 100000\n")
    assert found(limits.check()) == {}
    Path(limits.CPU_QUOTA).write_text("150000 100000\n")
    assert list(found(limits.check())) == ["The machine has 8 cores, and this process may use 1.5 of them."]


def test_shared_memory_that_cannot_be_written_is_wrong(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert list(found(limits.check()).values()) == [WRONG]


# ---- clock -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The two clocks, which the test moves: both run while the check sleeps."""
    now = SimpleNamespace(wall=time.time(), steady=100.0, jump=0.0)

    def sleep(seconds: float) -> None:
        now.wall += seconds + now.jump
        now.steady += seconds

    fake = SimpleNamespace(time=lambda: now.wall, monotonic=lambda: now.steady, sleep=sleep)
    monkeypatch.setattr(clock, "time", fake)
    monkeypatch.setenv("TZ", "UTC")
    return now


def test_an_even_clock_of_today_is_fine(clocks: SimpleNamespace) -> None:
    assert found(clock.check()) == {}


def test_a_jump_and_a_late_date_are_noted(clocks: SimpleNamespace) -> None:
    clocks.jump = -2.0
    assert list(found(clock.check())) == ["The wall clock moved by -2.00 s against the steady clock within 0.3 s."]
    clocks.jump, clocks.wall = 0.0, 0.0
    assert [what.partition(",")[0] for what in found(clock.check())] == ["The wall clock shows 1970-01-01"]


def test_an_unknown_time_zone_is_noted(clocks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for zone, findings in (
        ("Europe/Berlin", []),
        ("Europe/Berlln", ["TZ=Europe/Berlln is no time zone of this machine."]),
    ):
        monkeypatch.setenv("TZ", zone)
        monkeypatch.setattr(clock.zoneinfo, "available_timezones", lambda: {"Europe/Berlin"})
        assert list(found(clock.check())) == findings


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "wanted", "holds"),
    [
        ("2.13.0+cpu", ">=2.9", True), ("2.8.1", ">=2.9", False), ("2.10", ">=2.9", True), ("5.0", "<5,>=4.53", False),
        ("4.60", "<5,>=4.53", True), ("2.13.0", "==2.13", True), ("2.13.1", "==2.13.0", False), ("3.0", "!=3", False),
        ("2.14.0.dev20261101", ">=2.9", True), ("1.0", "", True), ("3.15.0", ">=3.10,<3.15", False),
    ],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(version: str, wanted: str, holds: bool) -> None:
    assert versions.fits(version, wanted) is holds


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed versions by name, which a test may change."""
    given = {"torch": "2.13.0", "rich": "15.0", "tqdm": "4.70"}
    texts = {
        "drivetrain": ["torch>=2.9", "rich>=13", 'tqdm>=4.65; extra == "tqdm"', 'ray>=2; extra == "ray"',
                       'drivetrain[tqdm]; extra == "dev"', 'mypy>=99; extra == "dev"'],
        "torchvision": ["numpy", "torch==2.13.0", 'scipy; extra == "scipy"'],
    }  # fmt: skip
    monkeypatch.setattr(versions.metadata, "metadata", lambda name: {"Requires-Python": ">=3.10,<4"})
    monkeypatch.setattr(versions.metadata, "requires", texts.get)
    monkeypatch.setattr(versions, "_version", given.get)
    return given


def test_versions_that_fit_are_facts(installed: dict[str, str]) -> None:
    assert [str(item) for item in versions.check()][2:] == [
        "torch 2.13.0", "rich 15.0", "tqdm 4.70", "not installed: ray",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "version", "what", "severity"),
    [
        ("torch", "2.1", "torch is 2.1, and drivetrain needs torch>=2.9.", WRONG),
        ("rich", None, "rich is not installed, and drivetrain needs rich>=13.", WRONG),
        ("tqdm", "4.1", "tqdm is 4.1, and drivetrain needs tqdm>=4.65.", NOTE),
        ("torch", "2.14", "torchvision 0.28 was made for torch==2.13.0, and torch is 2.14.", WRONG),
    ],
)
def test_a_version_that_does_not_fit_is_found(
    installed: dict[str, Any], name: str, version: str | None, what: str, severity: str
) -> None:
    installed["torchvision"] = "0.28"
    assert found(versions.check()) == {}
    installed[name] = version
    assert found(versions.check())[what] == severity


def test_another_python_is_found(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "metadata", lambda name: {"Requires-Python": "<3"})
    assert [what.rpartition(" ")[2] for what in found(versions.check())] == ["<3."]


def test_a_folder_in_place_of_a_package_is_noted(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "metadata", missing)
    assert list(found(versions.check()).values()) == [NOTE]
    [note] = [item for item in versions.check() if isinstance(item, Finding)]
    assert note.write == f"pip install -e {Path(__file__).parents[2]}"  # not from an index, where there is none
    monkeypatch.setattr(versions.drivetrain, "__file__", "/opt/copied/drivetrain/__init__.py")
    [note] = [item for item in versions.check() if isinstance(item, Finding)]
    assert note.write.startswith("pip install WHEEL")
