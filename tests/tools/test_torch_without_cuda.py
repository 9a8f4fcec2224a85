"""make test-torch: stubs for libraries that are missing, and a torch that pip takes for complete."""

from __future__ import annotations

import ctypes
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return runpy.run_path(str(ROOT / "tools" / "torch_without_cuda.py"))


@pytest.mark.skipif(not shutil.which("gcc") or not shutil.which("readelf"), reason="needs gcc and readelf")
def test_a_library_that_needs_a_missing_one_of_cuda_loads_with_its_stub(tool: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()

    def compiled(name: str, source: str, *options: str) -> Path:
        (tmp_path / "source.c").write_text(source)
        target = folder / name
        command = ["gcc", "-shared", "-fPIC", "-o", str(target), str(tmp_path / "source.c"), f"-Wl,-soname,{name}"]
        subprocess.run([*command, f"-L{folder}", "-Wl,-rpath,$ORIGIN", *options], check=True)
        return target

    missing = compiled("libcuthing.so", "int cuAsk(void) { return 0; }")
    torchs = compiled("libtorchs.so", "int cuAsk(void); int ask(void) { return cuAsk(); }", "-lcuthing")
    missing.unlink()
    with pytest.raises(OSError, match="libcuthing"):
        ctypes.CDLL(str(torchs))
    tool["make_stubs"](folder)
    assert ctypes.CDLL(str(torchs)).ask() == tool["NO_DEVICE"]


def test_the_metadata_asks_for_what_the_stubs_do_not_replace(tool: dict[str, Any]) -> None:
    asked = [
        "filelock",
        "nvidia-cudnn-cu13==9.24",
        'cuda-bindings<14; platform_system == "Linux"',
        "triton~=3.8",
        "sympy",
    ]
    metadata = "Name: torch\n" + "".join(f"Requires-Dist: {each}\n" for each in asked) + "\nText on nvidia.\n"
    left = "Name: torch\nRequires-Dist: filelock\nRequires-Dist: sympy\n\nText on nvidia.\n"
    assert tool["without_cuda"](metadata) == left


def test_the_pins_leave_the_version_of_torch_open(tool: dict[str, Any]) -> None:
    pins = tool["pins"]().read_text().splitlines()
    assert "torchmetrics==1.9.0" in pins
    assert [pin for pin in pins if pin.startswith("torch==")] == []


def test_the_page_on_releases_names_the_versions_of_torch_that_the_files_name() -> None:
    page = (ROOT / "docs" / "release.md").read_text(encoding="utf-8")
    [pinned] = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    [newest] = re.findall(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    [oldest] = re.findall(r'"torch>=(.*?)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"torch {pinned} on Python" in page
    assert f"by default {newest}," in page
    assert f"`make test-torch TORCH={oldest}." in page
