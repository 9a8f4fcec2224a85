"""Jobs of two ranks that are sent a signal: how they end, and what they leave."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

PROGRAM = Path(__file__).with_name("stop_program.py")
LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"
CASES = [
    ("ddp_fork", signal.SIGTERM, "launcher"),
    ("ddp_fork", signal.SIGINT, "launcher"),
    ("ddp_fork", signal.SIGTERM, "group"),
]
if LONG:
    CASES += [
        (start, number, to)
        for start in ("ddp", "ddp_spawn")
        for number in (signal.SIGTERM, signal.SIGINT)
        for to in ("launcher", "group")
    ]


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the signals of POSIX")


@ON_LINUX
@pytest.mark.parametrize(("strategy", "number", "to"), CASES)
def test_t32_a_job_that_is_sent_a_signal_saves_once_and_ends_with_its_code(
    programs: Any, tmp_path: Path, strategy: str, number: int, to: str
) -> None:
    """The signal goes to the launching process alone, or to a rank and its loader's workers."""
    done = programs.run(PROGRAM, strategy, int(number), to, cwd=tmp_path, timeout=60)
    name, code = ("SIGTERMException", 143) if number == signal.SIGTERM else ("KeyboardInterrupt", 130)
    assert done.returncode == code, done.stderr
    told = re.findall(r"(\w+) in step (\d+) of process (\d+)\n", done.stdout)
    assert [(kind, step) for kind, step, _ in told] == [(name, told[0][1])] * 2  # both, and in the same step
    assert int(told[0][1]) >= 5
    assert [path.name for path in tmp_path.rglob("*stopped.ckpt")] == ["stopped.ckpt"]
    assert not any(psutil.pid_exists(int(pid)) for *_, pid in told)


@ON_LINUX
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp", "ddp_spawn"] if LONG else ["ddp_fork"])
def test_ranks_that_have_not_saved_within_stop_timeout_s_are_killed(
    programs: Any, tmp_path: Path, strategy: str
) -> None:
    """The save of these would never end, and no limit but that of the Trainer's argument ends them."""
    done = programs.run(PROGRAM, strategy, int(signal.SIGTERM), "launcher", "stuck", cwd=tmp_path, timeout=60)
    assert done.returncode == 143, done.stderr
    saving = {int(pid) for pid in re.findall(r"process (\d+) saves\n", done.stdout)}
    assert len(saving) == 2  # the negative control: they were in their saves
    assert "Exception" not in done.stdout  # no rank came to on_exception
    killed = re.findall(r"Rank \d \(process (\d+)\) is killed, because .* within 1 s of a signal", done.stderr)
    assert {int(pid) for pid in killed} == saving
    assert "What it was saving is lost" in done.stderr
    assert not any(psutil.pid_exists(pid) for pid in saving)


@ON_LINUX
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp", "ddp_spawn"] if LONG else ["ddp_fork"])
def test_a_second_ctrl_c_ends_all_ranks_at_once(programs: Any, tmp_path: Path, strategy: str) -> None:
    done = programs.run(PROGRAM, strategy, int(signal.SIGINT), "launcher", "again", cwd=tmp_path, timeout=60)
    assert done.returncode == 130, done.stderr
    told = re.findall(r"(\w+) in step 5 of process (\d+)\n", done.stdout)
    assert "KeyboardInterrupt" in [kind for kind, _ in told]  # on_exception is called
    assert list(tmp_path.rglob("*stopped.ckpt")) == []
    assert not any(psutil.pid_exists(int(pid)) for _, pid in told)
