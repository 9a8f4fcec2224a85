"""``drivetrain run``: what an Engine leaves out comes from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from drivetrain.cli import run

Run = Callable[..., "CompletedProcess[str]"]

PROGRAM = """\
import json, os, sys
from drivetrain import Engine
engine = Engine(**json.loads(sys.argv[1]))
names = ["NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
print(json.dumps([engine.precision.name, str(engine.device), sys.argv[2:], [os.environ.get(name) for name in names]]))
"""


@pytest.fixture
def command(programs: Any, tmp_path: Path) -> Run:
    """Run the command in a folder that holds the program above; with ``fresh``, in an interpreter of its own."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environ = {
        name: value for name, value in os.environ.items() if name not in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    }

    def started(*arguments: str, fresh: bool = False) -> CompletedProcess[str]:
        line = ["-m", "drivetrain.cli.command", "run", *arguments]
        if fresh:
            return subprocess.run([sys.executable, *line], cwd=tmp_path, env=environ, capture_output=True, text=True)
        done: CompletedProcess[str] = programs.run(*line, cwd=tmp_path, env=environ)
        return done

    return started


def answer(done: CompletedProcess[str]) -> list[object]:
    assert (done.returncode, done.stderr) == (0, "")
    found: list[object] = json.loads(done.stdout)
    return found


def test_an_engine_takes_what_it_leaves_out_from_the_command_line(command: Run) -> None:
    chosen = ("--accelerator=cpu", "--devices=1", "--precision", "bf16-mixed")
    cluster = ("--node-rank=0", "--main-address=127.0.0.1", "--main-port=29500")
    assert answer(command(*chosen, *cluster, "program.py", "{}", "--precision=mine", fresh=True)) == [
        "bf16-mixed", "cpu", ["--precision=mine"], ["0", "127.0.0.1", "29500"],
    ]  # fmt: skip


def test_without_options_a_program_runs_as_it_is_also_as_a_module(command: Run) -> None:
    program = json.dumps({"accelerator": "cpu", "precision": "64-true"})
    assert answer(command("-m", "program", program, "-m")) == ["64-true", "cpu", ["-m"], [None, None, None]]


def test_a_program_that_says_otherwise_ends_with_an_error(command: Run) -> None:
    done = command("--precision=bf16-mixed", "program.py", json.dumps({"precision": "64-true"}))
    assert done.returncode == 1
    assert "Engine(precision='64-true'), and its command line --precision=bf16-mixed" in done.stderr
    first = done.stderr.splitlines()[1]
    assert "program.py" in first  # and none of our own files above it


def test_a_missing_program_is_answered(command: Run) -> None:
    done = command("trian.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "drivetrain run: there is no file 'trian.py'. For a module, write -m before its name.\n"


@pytest.mark.parametrize(
    "arguments", [["--presicion=16-true", "a.py"], ["--num-nodes=two", "a.py"], ["--prec=1", "a.py"], []]
)
def test_wrong_options_are_answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    assert ended.value.code == 2
    assert "drivetrain run: error:" in capsys.readouterr().err
