"""The version of the program's code."""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.report import code


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git(tmp_path, "init", "-q", "-b", "trunk")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "train.py")))  # type: ignore[arg-type]
    return tmp_path


def version() -> tuple[dict[str, Any], str]:
    code._version.cache_clear()
    return code.version_of()


def test_a_clean_repository_has_a_commit_and_no_diff(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert version() == ({"folder": str(repository), "commit": commit, "branch": "trunk", "dirty": False}, "")


def test_a_changed_file_is_in_the_diff_also_if_it_is_staged(repository: Path) -> None:
    (repository / "train.py").write_text("lr = 0.2\n")
    found, diff = version()
    assert found["dirty"]
    assert "-lr = 0.1\n+lr = 0.2\n" in diff
    git(repository, "add", "train.py")
    assert version() == (found, diff)


def test_a_long_diff_is_cut_and_tells_its_length(repository: Path) -> None:
    (repository / "train.py").write_text("x = 1\n" * 50_000)
    found, diff = version()
    assert len(diff) < code.DIFF_LIMIT + 100
    assert "... cut here: the diff has 3" in diff.splitlines()[-1]
    first = found["diff"]
    (repository / "train.py").write_text("x = 1\n" * 49_999 + "x = 2\n")
    assert version()[0]["diff"] != first, "the digest is that of the complete diff"


def test_a_diff_is_read_in_pieces(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "train.py").write_text("x = 1\n" * 2_000_000)
    monkeypatch.setattr(code, "_TIMEOUT_S", 60.0)
    tracemalloc.start()
    try:
        assert "... cut here: the diff has 14" in version()[1]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 10 * code.DIFF_LIMIT


def test_programs_of_the_repository_s_configuration_do_not_run(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "config", "diff.external", f"touch {repository}/external; true")
    git(repository, "config", "core.fsmonitor", f"touch {repository}/monitor; true")
    git(repository, "config", "diff.text.textconv", f"touch {repository}/text; cat")
    for name in ("plain", "a=b"):
        git(repository, "config", f"filter.{name}.clean", f"touch {repository}/clean; cat")
        git(repository, "config", f"filter.{name}.process", f"touch {repository}/process; false")
        git(repository, "config", f"filter.{name}.smudge", f"touch {repository}/smudge; cat")
        git(repository, "config", f"filter.{name}.required", "true")
    (repository / ".gitattributes").write_text("*.py diff=text filter=plain\n*.txt filter=a=b\n")
    (repository / "train.py").write_text("lr = 0.2\n")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.abbrev")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "12")
    found = version()[1]
    assert "+lr = 0.2" in found
    assert re.search(r"^index [0-9a-f]{12}\.\.[0-9a-f]{12} ", found, re.MULTILINE), "the user's variables count"
    assert not {"external", "monitor", "text", "clean", "process", "smudge"} & {
        path.name for path in repository.iterdir()
    }
    git(repository, "config", "--unset", "filter.plain.process")
    git(repository, "diff", "HEAD")  # which runs them, so that the check can fail
    assert (repository / "external").exists()
    assert (repository / "clean").exists()


def test_a_folder_without_a_repository_or_a_machine_without_git_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "train.py")))  # type: ignore[arg-type]
    assert version()[0]["note"] == "the folder is in no git repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert version()[0]["note"] == "git is not installed"


def test_a_repository_without_a_commit_has_no_diff(tmp_path: Path, repository: Path) -> None:
    git(repository, "checkout", "-q", "--orphan", "empty")
    found, diff = version()
    assert (found["commit"], found["dirty"], diff) == ("(initial)", True, "")


def test_a_repository_that_git_refuses_to_read_is_a_note_with_git_s_reason(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert "dubious ownership" in version()[0]["note"]


def test_a_diff_that_git_cannot_make_is_a_note_beside_the_commit(repository: Path) -> None:
    (repository / "train.py").write_text("lr = 0.2\n")
    blob = git(repository, "rev-parse", "HEAD:train.py")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    found, diff = version()
    assert (found["commit"], found["dirty"], diff) == (git(repository, "rev-parse", "HEAD"), True, "")
    assert "git failed" in found["note"]


def test_git_that_hangs_is_a_note(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (repository / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(repository), prepend=":")
    monkeypatch.setattr(code, "_TIMEOUT_S", 0.1)
    assert "timed out" in version()[0]["note"]


def test_a_module_or_an_installed_program_is_looked_for_in_the_working_folder(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    for main in (SimpleNamespace(), SimpleNamespace(__file__=f"{sys.prefix}/bin/drivetrain")):
        monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[arg-type]
        assert version()[0]["branch"] == "trunk"
