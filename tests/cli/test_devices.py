"""``drivetrain devices``: a row for every accelerator, whatever state it is in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from drivetrain.accelerators import Accelerator, AcceleratorRegistry
from drivetrain.cli import devices
from drivetrain.cli.command import main

GIB = 1 << 30


@pytest.fixture
def registry() -> Iterator[Any]:
    """The accelerators, and afterwards without what the test has added."""
    before = dict(AcceleratorRegistry._registered)
    yield AcceleratorRegistry
    AcceleratorRegistry._registered.clear()
    AcceleratorRegistry._registered.update(before)


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    """What the command says as JSON: the accelerators by name, and the "other" ones."""

    def run() -> dict[str, Any]:
        assert main(["devices", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        return {**{row["name"]: row for row in said["accelerators"]}, "other": said["other"]}

    return run


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, str]]:
    """What the command prints: each line by its first word."""

    def run() -> dict[str, str]:
        assert main(["devices"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(line == line.rstrip() for line in lines)
        return {line.split()[0]: line for line in lines if line}

    return run


def define(registry: Any, sizes: Sequence[Any], available: bool = True, priority: int | None = None) -> None:
    """An accelerator called "mine" with one device for each of ``sizes``."""

    class Mine(Accelerator):
        auto_priority = priority

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
            return [torch.device("cpu", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return len(sizes)

        @staticmethod
        def is_available() -> bool:
            return available

        @classmethod
        def why_unavailable(cls) -> str:
            return "its cable is missing"

        def get_device_stats(self, device: torch.device) -> dict[str, float]:
            return {}

        def total_memory(self, device: torch.device) -> int | None:
            if isinstance(size := sizes[device.index or 0], Exception):
                raise size
            return None if size is None else int(size * GIB)

    registry.register("mine", Mine, description="Of this test")


def test_ours_are_listed_with_what_is_missing(listed: Any) -> None:
    found = listed()
    assert set(found) >= {"cpu", "cuda", "mps", "tpu", "xla", "other"}
    assert found["cpu"] == {
        "name": "cpu", "description": "The host's processors.", "available": True, "reason": "", "devices": 1,
        "total_memory": [psutil.virtual_memory().total], "auto_priority": 0, "also": [],
    }  # fmt: skip
    for name in ("cuda", "mps", "tpu", "xla"):
        cls = AcceleratorRegistry.entry(name).cls
        assert found[name]["available"] == cls.is_available()
        if not found[name]["available"]:
            assert found[name]["reason"] == cls.why_unavailable()
            assert (found[name]["devices"], found[name]["total_memory"]) == (0, [])


def test_an_accelerator_with_two_names_has_one_line(listed: Any, table: Any) -> None:
    assert table()["tpu,"].startswith("tpu, xla  ")
    assert "xla" not in table()
    assert (listed()["tpu"]["also"], listed()["xla"]["also"]) == (["xla"], ["tpu"])


def test_simulated_devices_are_not_listed_but_can_be_named(listed: Any, table: Any) -> None:
    assert "fake" not in listed()
    assert "fake" not in table()
    assert AcceleratorRegistry.get("fake").is_available()


@pytest.mark.parametrize(
    ("sizes", "state"),
    [
        ([80], "1 device, 80.0 GiB"), ([None], "1 device"),
        ([80, 80], "2 devices, 80.0 GiB each"), ([80, 40.5], "2 devices, 80.0, 40.5 GiB"),
        ([80, None], "2 devices, 80.0, ? GiB"), ([None, None], "2 devices"), ([], "0 devices"),
    ],
)  # fmt: skip
def test_how_many_and_how_much_memory(registry: Any, table: Any, listed: Any, sizes: Any, state: str) -> None:
    define(registry, sizes, priority=250)
    assert f"  {state}  " in table()["mine"]
    assert table()["mine"].endswith("  Of this test")
    row = listed()["mine"]
    assert row["total_memory"] == [None if size is None else int(size * GIB) for size in sizes]
    assert (row["devices"], row["auto_priority"]) == (len(sizes), 250)


def test_one_that_is_not_there_says_why(registry: Any, table: Any, listed: Any) -> None:
    define(registry, [80], available=False)
    assert "  no: its cable is missing  " in table()["mine"]
    assert (listed()["mine"]["reason"], listed()["mine"]["auto_priority"]) == ("its cable is missing", None)


def test_one_that_fails_does_not_hide_the_others(registry: Any, table: Any, listed: Any) -> None:
    define(registry, [RuntimeError("the driver\n  hung")])
    assert "  no: asking it raised RuntimeError: the driver hung  " in table()["mine"]
    assert listed()["mine"]["available"] is False
    assert listed()["cpu"]["available"] is True


def test_torchs_other_device_types_stand_in_one_line(table: Any, listed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = table()["Other"].replace(",", "").split()
    assert {"mtia", "hpu"} <= set(words)
    assert not {"cpu", "cuda", "mps", "xla", "meta", "mkldnn"} & set(words)
    # one of them that is here has a row of its own
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert "  2 devices  " in table()["xpu"]
    assert "xpu" not in table()["Other"]
    found = listed()
    assert found["xpu"]["available"] is True
    assert "xpu" not in found["other"]
    assert "mtia" in found["other"]


# ---- in a process of its own -----------------------------------------------------------------------------------------


@pytest.fixture
def command(programs: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command; with ``fresh``, in an interpreter of its own."""

    def run(*arguments: str, path: Path | None = None, fresh: bool = False) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
        line = ["-W", "error", "-m", "drivetrain.cli.command", "devices", *arguments]
        if fresh:
            return subprocess.run([sys.executable, *line], env=environ, capture_output=True, text=True)
        done: subprocess.CompletedProcess[str] = programs.run(*line, cwd=Path.cwd(), env=environ)
        return done

    return run


GOOD = """
import torch
from drivetrain.accelerators import CPUAccelerator
class Good(CPUAccelerator):
    "The good one."
    @classmethod
    def register_accelerators(cls, accelerator_registry):
        accelerator_registry.register("good", cls)
"""


def test_installed_packages_are_listed_also_where_they_do_not_import(command: Any, tmp_path: Path) -> None:
    (tmp_path / "good_vendor.py").write_text(GOOD, encoding="utf-8")
    (tmp_path / "bad_vendor.py").write_text("import a_driver_that_is_not_there\n", encoding="utf-8")
    info = tmp_path / "vendors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendors\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[drivetrain.accelerators]\ngood = good_vendor:Good\nbad = bad_vendor:Bad\nodd = math:pi\n", encoding="utf-8"
    )
    done = command("--json", path=tmp_path, fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = {row["name"]: row for row in json.loads(done.stdout)["accelerators"]}
    assert (found["good"]["available"], found["good"]["description"]) == (True, "The good one.")
    assert found["bad"]["available"] is False
    assert found["bad"]["reason"] == (
        "it cannot be imported: ModuleNotFoundError: No module named 'a_driver_that_is_not_there'"
    )
    assert found["odd"]["available"] is False
    assert found["cpu"]["available"] is True
    shown = command(path=tmp_path).stdout
    assert "no: it cannot be imported: ModuleNotFoundError" in shown
    assert "bad" not in {row["name"] for row in json.loads(command("--json").stdout)["accelerators"]}  # the control


@pytest.mark.parametrize("arguments", [["--jsn"], ["cpu"]])
def test_wrong_options_are_answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        devices.main(arguments)
    assert ended.value.code == 2
    assert "drivetrain devices: error:" in capsys.readouterr().err
