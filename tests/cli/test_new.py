"""``drivetrain new``: the project trains, passes its own tests, and is clean for a linter and a type checker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.command import main
from drivetrain.cli.new import _FILES


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my_project"]) == 0
    assert "cd my_project\n  drivetrain fit config.yaml" in capsys.readouterr().out
    return tmp_path / "my_project"


def test_the_project_is_there_and_its_name_is_put_in(project: Path) -> None:
    files = sorted(path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file())
    assert files == sorted([*(path.replace("$name", "my_project") for path in _FILES), "my_project/__init__.py"])
    assert all("$" not in (project / path).read_text(encoding="utf-8") for path in files)


def checked(project: Path, *command: str) -> None:
    script = Path(sys.executable).parent / command[0]
    environ = {**os.environ, "MYPYPATH": str(project)}
    done = subprocess.run([script, *command[1:]], cwd=project, env=environ, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_it_is_clean_for_a_linter(project: Path) -> None:
    checked(project, "ruff", "check", ".")
    checked(project, "ruff", "format", "--check", ".")


@pytest.mark.timeout(600)
@pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="reads torch's types: make test-faults")
def test_it_is_clean_for_a_type_checker(project: Path) -> None:
    checked(project, "mypy", "my_project", "tests")


def test_it_trains_and_passes_its_own_tests(project: Path, programs: Any) -> None:
    fit = ("-m", "drivetrain.cli.command", "fit", "config.yaml", "--trainer.max_epochs")
    for words in (["1"], ["2", "--ckpt_path", "last"]):
        fitted = programs.run(*fit, *words, cwd=project)
        assert fitted.returncode == 0, fitted.stderr
    [run] = project.glob("lightning_logs/*")
    assert list(run.glob("checkpoints/epoch=1-*.ckpt"))
    assert sorted(path.name for path in run.glob("config*")) == ["config-v1.yaml", "config.yaml"]
    tested = programs.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert tested.returncode == 0, tested.stdout
    assert "2 passed in" in tested.stdout  # and no warning


@pytest.mark.parametrize("name", ["my-project", "MyProject", "2d", "class", "torch", "json", "."])
def test_a_name_that_no_package_can_have_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "A b").mkdir()
    monkeypatch.chdir(tmp_path / "A b")
    with pytest.raises(SystemExit):
        main(["new", name])
    assert "cannot be the name of the project's package" in capsys.readouterr().err
    assert list((tmp_path / "A b").iterdir()) == []


def test_nothing_is_replaced(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "config.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["new", "my_project"])
    assert "exists and is not empty" in capsys.readouterr().err
    assert (project / "config.yaml").read_text(encoding="utf-8") == "mine"
