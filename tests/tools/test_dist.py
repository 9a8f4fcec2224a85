"""make dist: which interpreters it takes, and what it does not let pass in silence. Nothing is installed here."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def dist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dist", ROOT / "tools" / "dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answering(folder: Path, name: str, version: str, code: int = 0) -> Path:
    """A program that says of itself that it is a Python of this version."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {version}\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")
def test_an_interpreter_is_found_by_its_version_and_asked_for_it(dist: Any, path: Path) -> None:
    found = answering(path, "python3.12", "3.12")
    assert dist.executable_of("3.12") == str(found)
    assert dist.executable_of(str(found)) == str(found)
    with pytest.raises(dist.Failed, match="not found on the PATH"):
        dist.executable_of("3.13")
    answering(path, "python3.13", "3.12")
    with pytest.raises(dist.Failed, match="is Python 3.12"):
        dist.executable_of("3.13")
    answering(path, "python3.14", "command not found", code=127)
    with pytest.raises(dist.Failed, match="command not found"):
        dist.executable_of("3.14")
    old = answering(path, "old", "3.9")
    with pytest.raises(dist.Failed, match="is Python 3.9"):
        dist.executable_of(str(old))


@pytest.mark.skipif(sys.platform == "win32", reason="the programs are shell scripts")
def test_what_cannot_be_used_is_reported_and_fails_where_it_was_named(dist: Any, path: Path) -> None:
    [outcome] = dist.try_python("3.12", [], [], False)
    assert (outcome.state, outcome.remark) == ("not run", "not found on the PATH")
    assert dist.try_python("3.12", [], [], True)[0].state == "failed"


@pytest.mark.parametrize(
    ("states", "named", "code"),
    [
        ({"3.10": "not run", "3.11": "ran"}, "", 0),
        ({"3.11": "failed", "3.12": "ran"}, "", 1),
        ({}, "", 1),  # nothing was run
        ({"3.11": "ran"}, "3.11", 0),
        ({"3.11": "failed"}, "3.11", 1),
    ],
)
def test_the_exit_code_and_a_line_for_every_interpreter(
    dist: Any, capsys: pytest.CaptureFixture[str], states: dict[str, str], named: str, code: int
) -> None:
    asked: list[Any] = []

    def try_python(name: str, artefacts: Any, options: Any, is_named: bool) -> list[Any]:
        asked.append((name, options, is_named))
        return [dist.Outcome(name, "", states.get(name, "not run"), "the reason")]

    environ = {"DIST_PYTHONS": named} if named else {}
    code_of_main = dist.main(
        environ,
        build=lambda folder: [Path("x.whl")],
        describe=lambda artefacts: [Path("x.json")],
        try_python=try_python,
    )
    assert code_of_main == code
    names = named.split() or dist.SUPPORTED
    assert asked == [(name, ["--no-index"], bool(named)) for name in names]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("Python")] == list(names)
    assert any("Nothing was run" in line for line in lines) is (not states)


def test_its_interpreters_are_those_that_the_package_supports(dist: Any) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = {version for version in dist.SUPPORTED if f"Programming Language :: Python :: {version}" in project}
    assert named == set(dist.SUPPORTED) - dist.NEVER_RUN
    assert 'requires-python = ">=3.10,<3.15"' in project


def test_the_files_are_described_by_a_bill_and_their_checksums(dist: Any, tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "x-1.0-py3-none-any.whl", tmp_path / "x-1.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: x\nVersion: 1.0\nSummary: X.\n")
    sdist.write_bytes(b"sources")
    bill, sums = dist.describe([wheel, sdist])
    assert json.loads(bill.read_text())["metadata"]["component"]["purl"] == "pkg:pypi/x@1.0"
    lines = [line.split() for line in sums.read_text().splitlines()]
    assert [name for _, name in lines] == [wheel.name, sdist.name, bill.name]
    assert lines[1][0] == hashlib.sha256(b"sources").hexdigest()


def test_with_stubs_torch_comes_from_the_index_and_without_its_dependencies(
    dist: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []

    def run(*command: Any, cwd: Any = None) -> str:
        commands.append(" ".join(map(str, command)))
        if "--dest" in command:
            (command[command.index("--dest") + 1] / "torch-2.whl").touch()
        return "mean squared error on new pairs: 0.001"

    monkeypatch.setattr(dist, "run", run)
    monkeypatch.setattr(dist, "executable_of", lambda name: name)
    monkeypatch.setattr(dist, "new_environment", lambda interpreter, folder: folder.mkdir() or folder)
    for options, from_index, only in (["stubs"], True, 1), (["--no-index"], False, 0):
        commands.clear()
        [outcome] = dist.try_python("3.12", [Path("x.whl")], options, False)
        assert outcome.state == "ran"
        [download] = [each for each in commands if " download " in each]
        assert ("--no-index" not in download) is from_index
        assert "--no-deps" in download
        assert sum("torch_without_cuda.py --only" in each for each in commands) == only
        [install] = [each for each in commands if " install " in each]
        assert install.endswith("x.whl")
        assert ("torch-2.whl" in install) is not from_index


def test_it_runs_the_readmes_example(dist: Any) -> None:
    assert "trainer.fit(Product()" in dist.example()


def test_the_cause_in_an_output(dist: Any) -> None:
    assert dist.cause("note\nERROR: no wheel\nERROR: see there") == "ERROR: no wheel"
    assert dist.cause("Traceback\n  ...\nSyntaxError: no") == "SyntaxError: no"
    assert dist.cause("") == ""


def test_where_there_is_no_torch_what_does_not_import_is_a_failure(
    dist: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dist, "executable_of", lambda name: name)
    monkeypatch.setattr(dist, "new_environment", lambda interpreter, folder: folder)

    def none(*arguments: Any) -> Path:
        raise dist.Failed("ERROR: none")

    monkeypatch.setattr(dist, "torch_wheel", none)
    monkeypatch.setattr(dist, "try_without_torch", lambda python, wheel: "it imports")
    [outcome] = dist.try_python("3.12", [Path("x.whl")], ["--no-index"], False)
    assert outcome.state == "not run"
    assert outcome.remark == "no wheel of torch with pip's --no-index: ERROR: none; it imports"

    monkeypatch.setattr(dist, "try_without_torch", none)
    assert dist.try_python("3.12", [Path("x.whl")], ["--no-index"], False)[0].state == "failed"
