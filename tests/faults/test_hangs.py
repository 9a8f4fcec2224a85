"""A rank does not come to a collective: the message that says so, the end of a job that cannot go on, the watcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import psutil
import pytest

import drivetrain
from drivetrain.launchers import watcher
from drivetrain.launchers.board import NAMESPACE, PID, Board

PROGRAM = Path(__file__).with_name("hang_program.py")
SOON_S = 120.0  # generous for a machine at work: one that hangs takes half an hour
NEVER_S = "100000"
LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"
ALL_REDUCE = r"collective \d+ of the group 'default_pg', gloo:all_reduce"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="real-time signals and /proc")


def run(programs: Any, folder: Path, *arguments: str, **environ: str) -> Any:
    done = programs.run(PROGRAM, *arguments, cwd=folder, env={**os.environ, **environ}, timeout=SOON_S)
    assert "the fault was injected" in done.stdout, done.stderr  # the negative control of all that follows
    return done


def left_by(folder: Path) -> list[str]:
    """Processes that have this folder as theirs, and boards."""
    names = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if process.info["cwd"] == str(folder):
            names.append(" ".join(process.info["cmdline"] or ["?"]))
    return names + [str(each) for each in Path(folder / "tmp").glob("drivetrain-*")]


def temporary(folder: Path) -> str:
    (folder / "tmp").mkdir()
    return str(folder / "tmp")


def nothing_left(folder: Path) -> bool:
    deadline = time.monotonic() + SOON_S
    while left_by(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left_by(folder)


def test_t31_a_rank_that_is_late_is_named_and_the_job_goes_on(programs: Any, tmp_path: Path) -> None:
    """The message, the stacks in the folder of the run, and the command that shows the same by folder and process."""
    done = run(programs, tmp_path, "ddp_fork", "late", "1", TMPDIR=temporary(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "No rank has made progress for" in done.stderr
    assert re.search(rf"Rank 0 \(process \d+\) waits in {ALL_REDUCE}, for \d+ s, in the phase 'backward'", done.stderr)
    late = (
        r"Rank 1 \(process \d+\) waits in no collective.*, in the phase 'forward', after 4 batches had begun, in step 3"
    )
    assert re.search(rf"{late}, at {PROGRAM}:\d+ in wait_for_message", done.stderr)
    assert "Missing: rank 1." in done.stderr
    assert "The job is not ended." in done.stderr
    stacks = max(each.read_text() for each in tmp_path.glob("stalled-*.txt") if "Missing" in each.read_text())
    assert re.search(r'hang_program\.py", line \d+ in wait_for_message', stacks)
    assert re.search(r'direct\.py", line \d+ in train', stacks)  # of rank 0
    assert len(re.findall(late, done.stdout)) == 2  # once for each way to name the job
    assert done.stdout.count("==== rank 1") == 2
    assert "no job writes to nowhere" in done.stderr
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [("ddp_fork", "other collective")]
    + [("ddp_fork", "stopped"), ("ddp", "other collective"), ("torchrun", "other collective")] * LONG,
)
def test_t31_a_job_in_which_no_rank_can_go_on_is_ended(
    programs: Any, tmp_path: Path, strategy: str, fault: str
) -> None:
    environ = {"TMPDIR": temporary(tmp_path), "DRIVETRAIN_STOPPED_TIMEOUT_S": "0.5"}
    done = run(programs, tmp_path, strategy, fault, "1", **environ)
    assert "trained" not in done.stdout
    assert "The job is ended, because no rank can continue." in done.stderr
    assert re.search(rf"Rank 0 \(process \d+\) waits in {ALL_REDUCE}", done.stderr)
    words = "gloo:barrier" if fault == "other collective" else r"is stopped for \d+ s \(state T\)"
    assert re.search(rf"Rank 1 \(process \d+\) .*{words}", done.stderr)
    if strategy == "torchrun":
        assert done.stdout.count("rank ended with -9") == 2
    else:
        assert done.returncode == 1
        assert strategy == "ddp" or "LaunchError" in done.stderr
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [("torchrun", "exception")] + [("torchrun", "killed"), ("ddp_fork", "killed"), ("ddp", "killed")] * LONG,
)
def test_t31_the_report_names_the_collective_also_under_another_launcher(
    programs: Any, tmp_path: Path, strategy: str, fault: str
) -> None:
    done = run(programs, tmp_path, strategy, fault, NEVER_S, TMPDIR=temporary(tmp_path))
    assert nothing_left(tmp_path)  # the watcher has ended too, and has printed what it had to
    place = "in the phase 'forward', after 4 batches had begun, in step 3"
    if fault == "exception":
        assert re.search(r"Rank 1 of 2 \(process \d+\) raised ValueError: of this rank alone", done.stderr)
        assert re.search(rf"at {PROGRAM}:\d+ in fault", done.stderr)
        assert re.search(rf"That was {place}, after {ALL_REDUCE}", done.stderr)
    elif strategy == "torchrun":
        assert re.search(
            rf"Rank 1 of 2 \(process \d+\) ended without an exception, perhaps killed, {place}", done.stderr
        )
    else:
        assert "ended by the signal SIGKILL" in done.stderr
    assert re.search(rf"Rank 0 was in the phase 'backward', .*, in {ALL_REDUCE}", done.stderr)


@pytest.mark.skipif(not LONG, reason="make test-faults; tests/launchers/test_orphan.py has it without torch")
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp"])
def test_t31_ranks_that_wait_in_collectives_end_after_their_launching_process_was_killed(
    programs: Any, tmp_path: Path, strategy: str
) -> None:
    done = run(programs, tmp_path, strategy, "launcher killed", NEVER_S, TMPDIR=temporary(tmp_path))
    assert done.returncode == -signal.SIGKILL
    assert nothing_left(tmp_path)
    assert "trained" not in done.stdout


@pytest.mark.parametrize(
    ("strategy", "form", "fault"),
    [("ddp_fork", "function", "late")]
    + [("torchrun", "program", "other collective"), ("ddp", "program", "stopped"), ("torchrun", "program", "late")]
    * LONG,
)
def test_t31_a_rank_that_is_missing_in_a_program_on_the_engine_is_named(
    programs: Any, tmp_path: Path, strategy: str, form: str, fault: str
) -> None:
    environ = {"TMPDIR": temporary(tmp_path), "DRIVETRAIN_STOPPED_TIMEOUT_S": "0.5"}
    done = run(programs, tmp_path, strategy, fault, "1", form, **environ)
    place = "in a program on the Engine"
    assert re.search(r"A rank has waited in a collective for \d+ s \(stall_timeout_s=1\)", done.stderr)
    assert re.search(
        rf"Rank 0 \(process \d+\) waits in collective .*, {place}, at {PROGRAM}:\d+ in exchange", done.stderr
    )
    assert re.search(rf"Rank 1 \(process \d+\) .*, {place}", done.stderr)
    assert ("The job is ended" in done.stderr) == (fault != "late")
    assert done.stdout.count("trained") == (0 if fault != "late" else 1 if strategy == "ddp_fork" else 2)
    assert "perhaps killed" not in done.stderr
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "form"),
    [("torchrun", "program")] + [("ddp_fork", "function"), ("ddp", "function"), ("ddp", "program")] * LONG,
)
def test_t31_a_rank_that_fails_in_a_program_on_the_engine_ends_the_other_and_is_named(
    programs: Any, tmp_path: Path, strategy: str, form: str
) -> None:
    """Also where its process lives on."""
    done = run(programs, tmp_path, strategy, "exception", NEVER_S, form, TMPDIR=temporary(tmp_path))
    said = done.stderr
    assert nothing_left(tmp_path)
    assert "trained" not in done.stdout
    place = "in a program on the Engine"
    if strategy != "ddp_fork":  # rank 0 says it; there the LaunchError does
        assert re.search(
            rf"Rank 1 had failed, {place}: ValueError: of this rank alone, at {PROGRAM}:\d+ in fault", said
        )
    if strategy == "torchrun":
        assert done.stdout.count("rank ended with 1") == 2
    else:
        lives_on = (strategy, form) == ("ddp", "function")
        assert done.returncode == (128 + signal.SIGTERM if lives_on else 1)  # the launching process ends it
        assert re.search(r"Rank 1 of 2 \(process \d+.*\) raised ValueError: of this rank alone", said)
        assert re.search(f"{place}, after {ALL_REDUCE}", said)


@pytest.mark.skipif(not LONG, reason="make test-faults")
def test_a_job_without_a_fault_leaves_no_watcher(programs: Any, tmp_path: Path) -> None:
    done = programs.run(PROGRAM, "torchrun", "none", NEVER_S, cwd=tmp_path, timeout=SOON_S)
    assert done.stdout.count("rank ended with 0") == 2, done.stderr
    assert "Rank 1 of 2" not in done.stderr
    assert nothing_left(tmp_path)


def test_the_watcher_keeps_no_connection_of_its_rank_open_and_outlives_its_group(tmp_path: Path) -> None:
    """Other ranks notice the end of a rank by its connections; a launcher signals the rank's group."""
    board = Board(tmp_path, [0], 1)
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    sheet = array("q", [0] * 16)
    sheet[PID], sheet[NAMESPACE] = os.getpid(), os.stat("/proc/self/ns/pid").st_ino
    (tmp_path / "0.slot").write_bytes(sheet.tobytes())
    with ours:
        before = {each.pid for each in psutil.Process().children()}
        watcher.start(board.folder)
        [process] = [each for each in psutil.Process().children() if each.pid not in before]
        try:
            assert os.getpgid(process.pid) == process.pid
            theirs.close()
            ours.settimeout(SOON_S)
            assert ours.recv(1) == b""
            assert process.is_running()  # the negative control: it was not its end that closed them
        finally:
            process.kill()
            process.wait()


def test_the_watcher_starts_without_torch() -> None:
    root = str(Path(drivetrain.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); import drivetrain.launchers.watcher; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
