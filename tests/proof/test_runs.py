"""Copies of the working directory, the command of each start, and the steps at which a program is killed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.proof import runs
from drivetrain.proof.records import Start
from drivetrain.proof.runs import CannotTryError, Program, Run, copy_of, kills_for


def test_a_copy_has_what_a_program_reads_and_no_caches(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("train.py", "data/a.bin", ".git/head", "pkg/__pycache__/a.pyc", "env/pyvenv.cfg", "big/b.bin"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    copy_of(source, tmp_path / "copy", links=["big"])
    found = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*")}
    assert found == {"train.py", "data", "data/a.bin", "pkg", "big"}
    assert (tmp_path / "copy" / "big").resolve() == source / "big"
    (tmp_path / "copy" / "train.py").write_text("changed")
    assert (source / "train.py").read_text() == "train.py"


def test_pipes_and_earlier_records_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "source" / "before" / "undisturbed" / "records").mkdir(parents=True)
    (tmp_path / "source" / "train.py").touch()
    (tmp_path / "source" / "lost").symlink_to("nowhere")
    os.mkfifo(tmp_path / "source" / "pipe")
    copy_of(tmp_path / "source", tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["lost", "train.py"]


def test_a_directory_that_cannot_be_copied_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "vanishing.pt").touch()

    def unreadable(path: str, target: str, **options: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(shutil, "copystat", unreadable)
    with pytest.raises(CannotTryError, match="source cannot be copied: .*No such file"):
        copy_of(tmp_path / "source", tmp_path / "copy")


def test_a_large_directory_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source" / "data").mkdir(parents=True)
    (tmp_path / "source" / "data" / "a.bin").write_bytes(b"0" * 100)
    monkeypatch.setattr(runs, "_MOST_BYTES", 50)
    with pytest.raises(CannotTryError, match="--link data"):
        copy_of(tmp_path / "source", tmp_path / "copy")
    copy_of(tmp_path / "source", tmp_path / "linked", links=["data"])


def started(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of the program in the next start."""
    commands: list[list[str]] = []

    class Process:
        pid = 2**22 + 1  # none

        def __init__(self, command: list[str], **options: Any) -> None:
            commands.append(command)

        def wait(self, timeout: float | None = None) -> int:
            return 0

    monkeypatch.setattr(runs.subprocess, "Popen", Process)
    assert run.start(1.0) == 0
    [command] = commands
    assert command[0] == run.program.python
    return command[command.index("-c") + 2 :]


def test_a_restart_gets_the_newest_checkpoint_and_no_arguments_before_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    program = Program(["train.py"], ["--from", "{newest:out/step_*}"], source=tmp_path / "source")
    run = Run(program, tmp_path / "runs" / "killed")
    assert started(run, monkeypatch) == ["train.py"]
    assert started(run, monkeypatch) == ["train.py"]
    for name, changed in (("step_9", 1), ("step_10", 2), ("other", 3)):
        (run.work / "out" / name).mkdir(parents=True)
        os.utime(run.work / "out" / name, (changed, changed))
    assert started(run, monkeypatch) == ["train.py", "--from", "out/step_10"]


def test_a_program_starts_with_this_python_unless_its_record_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    assert Program(["train.py"]).python == sys.executable
    run = Run(Program(["train.py"], source=tmp_path / "source", python="other/python"), tmp_path / "runs" / "one")
    assert started(run, monkeypatch) == ["train.py"]


def test_paths_in_the_working_directory_become_those_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    program = Program([f"{source}/train.py", f"--out={source}/out", "--log", "{run}/log"], source=source)
    run = Run(program, tmp_path / "runs" / "killed")
    assert started(run, monkeypatch) == [f"{run.work}/train.py", f"--out={run.work}/out", "--log", f"{run.work}/log"]


def test_relative_paths_out_of_the_working_directory_keep_their_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "data.pt").touch()
    words = ["../data.pt", "--data=../data.pt", "--sum=a/../b", "../not_there", "..."]
    run = Run(Program(["../source/train.py", *words], source=tmp_path / "source"), tmp_path / "runs" / "killed")
    data = tmp_path / "data.pt"
    assert started(run, monkeypatch) == ["../source/train.py", f"{data}", f"--data={data}", *words[2:]]


class Timed:
    """Stands for an undisturbed run with a step each second."""

    def __init__(self, count: int) -> None:
        self.count = count

    def ranks(self) -> list[int]:
        return [0]

    def starts(self, rank: int) -> list[Start]:
        return [Start([{"time": float(number)} for number in range(self.count)])]


@pytest.mark.parametrize("count", [2, 3, 7, 100])
def test_kills_are_spread_over_the_run_and_drawn_by_the_seed(count: int) -> None:
    run: Any = Timed(count)
    kills = kills_for(run, 5, 3)
    assert kills == kills_for(run, 5, 3)
    assert len(kills) == min(5, count - 1)
    steps = [step for step, _ in kills]
    assert steps == sorted(set(steps))
    assert all(1 <= step < count and 0 <= seconds < 1 for step, seconds in kills)
    assert count < 100 or kills != kills_for(run, 5, 4)
    assert count < 100 or [step // 20 for step in steps] == [0, 1, 2, 3, 4]
