"""The device is compiled once, into a place that is safe; what goes wrong is said."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Stands for a compiler: writes down that it was called, and makes what it was to make.
COMPILER = f"""#!{sys.executable}
import pathlib, sys
with pathlib.Path(__file__).with_name("calls").open("a") as calls:
    calls.write("x")
if "broken" in __file__:
    sys.exit("device.h:1: error: it does not compile")
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).touch()
"""


def use_compiler(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(COMPILER)
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))


@pytest.fixture
def build(vendor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """build.py with copies of the sources, no cache yet, and that compiler."""
    module: ModuleType = vendor.load_build()
    for name in ("_SOURCES", "_HEADERS"):
        monkeypatch.setattr(module, name, [Path(shutil.copy(path, tmp_path)) for path in getattr(module, name)])
    use_compiler(tmp_path / "cxx", monkeypatch)
    monkeypatch.setenv("LAB_CACHE", str(tmp_path / "cache"))
    return module


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text())


def test_it_is_compiled_once_and_left_as_one_file(build: ModuleType, tmp_path: Path) -> None:
    first = build.library()
    assert calls(tmp_path) == 3, "two sources and the link"
    assert build.library() == first
    assert calls(tmp_path) == 3
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_what_is_compiled_already_needs_no_compiler(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert build.library() == first


@pytest.mark.parametrize("change", ["device.h", "operators.cpp", "torch"])
def test_other_sources_or_another_torch_make_another(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    first = build.library()
    if change == "torch":
        monkeypatch.setattr(build.torch, "__version__", "2.99.0")
    else:
        (tmp_path / change).write_text("// another")
    assert build.library() != first
    assert calls(tmp_path) == 6


def test_the_compilers_words_are_in_the_error_and_nothing_is_left(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(tmp_path / "broken", monkeypatch)
    with pytest.raises(build.BuildError, match="(?s)ended with 1, .*device.h:1: error: it does not compile"):
        build.library()
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_compiler_it_says_what_to_install(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert build.compiler() is None
    with pytest.raises(build.BuildError, match="there is no compiler. Install g\\+\\+, or set CXX."):
        build.library()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_refused(build: ModuleType, tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(build.BuildError, match="Others may write to .*cache.* Run chmod 700 on it, or set LAB_CACHE"):
        build.library()


def test_the_users_cache_is_the_default(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.library().parent == tmp_path / "xdg" / "drivetrain-lab"
