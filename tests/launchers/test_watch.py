"""Ranks that make no progress: the message, and which of them let a job be ended."""

from __future__ import annotations

import json
import os
import pdb
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launchers import stacks, watch
from drivetrain.launchers.board import BATCHES, NAMESPACE, PHASE, PID, SHOWN, STALL, Board
from drivetrain.launchers.stacks import Answer, Process
from drivetrain.launchers.watch import Seen, Watch, cannot_go_on, describe

TRACES = Path(__file__).parent / "traces"
TORCH = "/x/site-packages/torch"
BACKWARD = [f"{TORCH}/autograd/graph.py", "/home/me/train.py"]
BARRIER = [f"{TORCH}/distributed/distributed_c10d.py", "/home/me/train.py"]
WAITED_S = 100.0


def stack(files: Sequence[str]) -> str:
    """What faulthandler writes for a second thread and a main thread that is in these files."""
    frames = "".join(f'  File "{each}", line 7 in f\n' for each in files)
    other = 'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1 in run\n\n'
    return f"{other}Current thread 0x2 (most recent call first):\n{frames}"


def seen(trace: Any, files: Sequence[str] = BACKWARD, state: str = "S", **facts: Any) -> Seen:
    traced = facts.pop("traced", False)
    answers = state not in ("T", "t", "Z")
    answer = Answer(5, Process(state, traced), stack(files) if answers else "", trace if answers else None)
    return Seen("in the phase 'forward'", answer, **facts)


def ranks(fault: str, *others: Seen | dict[str, Any]) -> dict[int, Seen]:
    """The ranks of a stored fault: rank 0 waits for the others, which do what they are told."""
    traces = {int(rank): trace for rank, trace in json.loads((TRACES / f"{fault}.json").read_text()).items()}
    found = {0: seen(traces[0])}
    for rank, each in enumerate(others, 1):
        found[rank] = each if isinstance(each, Seen) else seen(traces[rank], **each)
    return found


# ---- when a job is ended ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "others"),
    [
        ("dead", [{"state": "Z"}]),
        ("dead", [{"state": ""}]),
        ("behind", [{"state": "T", "stopped_s": 61.0}]),
        ("other_collective", [{"files": BARRIER}]),
        ("other_shapes", [{"files": BACKWARD}]),
        ("crossed_groups", [{"files": BARRIER}]),
        ("two_of_three_behind", [{"state": "Z"}, {"state": "T", "stopped_s": 61.0}]),
    ],
)
def test_a_job_is_ended_if_each_missing_rank_is_dead_or_stopped_or_in_another_collective(
    fault: str, others: list[dict[str, Any]]
) -> None:
    assert cannot_go_on(ranks(fault, *others), WAITED_S)


@pytest.mark.parametrize(
    ("fault", "others"),
    [
        pytest.param("behind", [{"files": ["/x/python3.11/pdb.py", "/home/me/train.py"]}], id="pdb"),
        pytest.param("other_collective", [{"files": ["/x/python3.11/pdb.py"]}], id="pdb, a collective is under way"),
        pytest.param("behind", [{"state": "t", "traced": True}], id="stopped by a debugger"),
        pytest.param("other_collective", [{"files": BARRIER, "traced": True}], id="a debugger is attached"),
        pytest.param("other_collective", [{"files": BARRIER, "is_busy": True}], id="it uses the processor"),
        pytest.param("behind", [{"is_busy": True}], id="it computes"),
        pytest.param("behind", [{"files": ["/home/me/data.py"]}], id="prepare_data"),
        pytest.param("behind", [{"files": ["/x/python3.11/subprocess.py", f"{TORCH}/_inductor/x.py"]}], id="compiles"),
        pytest.param("behind", [{"files": ["/x/drivetrain/base/files.py"], "state": "D"}], id="saves"),
        pytest.param("behind", [{"state": "T", "stopped_s": 59.0}], id="stopped, and not for long"),
        pytest.param("two_of_three_behind", [{"state": "Z"}, {"files": ["/home/me/data.py"]}], id="one may come"),
        pytest.param("receive", [{}], id="a receive, which Gloo does not record"),
    ],
)
def test_a_job_goes_on_if_a_missing_rank_may_still_come(fault: str, others: list[dict[str, Any]]) -> None:
    assert not cannot_go_on(ranks(fault, *others), WAITED_S)


def test_a_job_goes_on_if_no_rank_has_waited_for_so_long() -> None:
    assert not cannot_go_on(ranks("other_collective", {"files": BARRIER}), 2 * time.time())


def test_a_job_goes_on_if_all_are_in_the_same_collective() -> None:
    found = ranks("behind", {})
    found[1] = found[0]
    assert not cannot_go_on(found, WAITED_S)


def test_a_job_goes_on_if_the_missing_rank_is_on_another_machine() -> None:
    found = ranks("behind", {})
    del found[1]
    assert not cannot_go_on(found, WAITED_S)


def test_a_chain_of_waits_ends_a_job_only_if_its_last_link_is_lost() -> None:
    """Rank 0 waits for rank 1 and 2, rank 1 in a group of its own for rank 2, and rank 2 decides."""
    crossed = json.loads((TRACES / "crossed_groups.json").read_text())["0"]
    crossed["members"] = {"0": [0, 1, 2], "1": [1, 2], "2": [0, 1]}
    chain = ranks("two_of_three_behind", seen(crossed), {"files": ["/home/me/data.py"]})
    assert not cannot_go_on(chain, WAITED_S)
    assert cannot_go_on({**chain, 2: seen(None, state="Z")}, WAITED_S)


# ---- the message -----------------------------------------------------------------------------------------------------


def test_the_message_names_who_waits_where_and_who_is_missing() -> None:
    lines = describe(ranks("behind", {"files": [pdb.__file__, "/home/me/train.py"]}))
    assert lines[0].startswith("Rank 0 (process 5) waits in collective 2 of the group 'default_pg', gloo:all_reduce")
    assert "in the phase 'forward', at /home/me/train.py:7 in f. Rank 1 has not come to it" in lines[0]
    assert lines[1].startswith(
        "Rank 1 (process 5) waits in no collective, in the phase 'forward', at /home/me/train.py"
    )
    assert lines[2] == "Missing: rank 1."


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ({"state": "T", "stopped_s": 3.0}, "is stopped for 3 s (state T)"),
        ({"state": "t"}, "is in a debugger"),
        ({"traced": True}, "is in a debugger"),
        ({"state": "Z"}, "has ended"),
        ({"is_busy": True}, "waits in no collective and uses the processor"),
    ],
)
def test_the_message_says_what_a_missing_rank_does(rank: dict[str, Any], words: str) -> None:
    assert words in describe(ranks("behind", rank))[1]


def test_the_message_names_the_rank_for_which_the_others_wait_in_the_set_up() -> None:
    """They wait at the store there, in no collective; and the job is not ended."""
    found = ranks("behind", {"files": ["/home/me/data.py"]})
    trace = found[1].answer.trace
    waiting = stack(["/x/drivetrain/trainer/votes.py", "/home/me/train.py"]).replace("in f", "in _voting")
    found[0] = Seen("in the phase 'set up'", Answer(5, Process("S"), waiting, trace))
    lines = describe(found)
    assert "waits for the other ranks at the end of a phase of the set-up, in the phase 'set up'" in lines[0]
    assert lines[2] == "Missing: rank 1."
    assert not cannot_go_on(found, WAITED_S)
    assert not cannot_go_on({**found, 1: seen(None, state="T", stopped_s=59.0)}, WAITED_S)
    assert cannot_go_on({**found, 1: seen(None, state="T", stopped_s=61.0)}, WAITED_S)


class Job:
    """A board with two ranks, a clock, and answers."""

    def __init__(self, folder: Path, stall_s: float = 10.0) -> None:
        (folder / "board").mkdir()
        self.board = Board(folder / "board", [0, 1], 2)
        (folder / "board" / "run").write_text(str(folder / "logs"))
        self.now, self.said, self.asked = 0.0, list[str](), 0
        self.answers = [each.answer for each in ranks("behind", {"files": ["/home/me/data.py"]}).values()]
        self.words = {PHASE: 14, SHOWN: 1, STALL: int(1000 * stall_s), PID: os.getpid()}
        if sys.platform == "linux":
            self.words[NAMESPACE] = os.stat("/proc/self/ns/pid").st_ino
        self.write()
        self.watch = Watch(self.board, self.said.append, self.ask, lambda: self.now)

    def write(self, **words: int) -> None:
        for each in range(2):
            content = array("q", [self.words.get(word, 0) for word in range(16)])
            (self.board.folder / f"{each}.slot").write_bytes(content.tobytes())

    def ask(self, board: Board, local_ranks: Sequence[int]) -> list[Answer]:
        self.asked += 1
        return self.answers

    def look_for(self, seconds: int) -> list[str]:
        """Look each half second; return why the job must end."""
        found = []
        for _ in range(2 * seconds):
            self.now += 0.5
            if text := self.watch.look():
                found.append(text)
        return found


def test_a_stall_is_said_once_and_its_stacks_are_in_the_folder_of_the_run(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.look_for(60) == []
    assert len(job.said) == 1
    assert job.said[0].startswith("No rank has made progress for 1")
    assert "(stall_timeout_s=10)" in job.said[0]
    assert "The job is not ended." in job.said[0]
    (file,) = (tmp_path / "logs").iterdir()
    assert str(file) in job.said[0]
    assert "==== rank 1 (process 5) ====" in file.read_text()
    assert "Current thread 0x2" in file.read_text()


def test_no_rank_is_asked_while_there_is_progress(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for batch in range(10):
        job.words[BATCHES] = batch
        job.write()
        assert job.look_for(9) == []
    assert (job.asked, job.said) == (0, [])


def test_another_stall_is_said_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.look_for(20)
    job.words[BATCHES] = 1
    job.write()
    job.look_for(20)
    assert len(job.said) == 2


def test_no_run_is_no_stall(tmp_path: Path) -> None:
    job = Job(tmp_path, stall_s=0)
    assert job.look_for(1000) == []
    assert job.asked == 0


def test_a_program_on_the_engine_shows_no_progress_and_is_spoken_of_once_for_each_long_wait(tmp_path: Path) -> None:
    job = Job(tmp_path)
    del job.words[SHOWN]
    job.write()
    waiting = job.answers
    job.answers = [waiting[1], waiting[1]]  # at work
    assert job.look_for(100) == []
    assert job.asked > 1
    assert job.said == []
    for _ in range(2):
        job.answers = waiting
        job.look_for(100)
        job.answers = [waiting[1], waiting[1]]
        job.look_for(100)
    assert len(job.said) == 2
    assert job.said[0].startswith("A rank has waited in a collective for ")


def test_a_job_that_cannot_go_on_is_ended_with_the_message(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.answers = [each.answer for each in ranks("other_collective", {"files": BARRIER}).values()]
    text = job.look_for(20)[0]
    assert text.startswith("No rank has made progress for 1")
    assert "The job is ended, because no rank can continue." in text
    assert job.said == []


def test_a_rank_that_is_stopped_counts_as_lost_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    monkeypatch.setattr(stacks, "process", lambda pid: Process("T"))
    job.answers = [each.answer for each in ranks("behind", {"state": "T"}).values()]
    job.look_for(59)
    assert "is stopped for 1" in job.said[0]
    assert "The job is ended" in job.look_for(20)[0]


def test_the_time_that_a_rank_may_be_stopped_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch.stopped_timeout_s() == 60
    monkeypatch.setenv("DRIVETRAIN_STOPPED_TIMEOUT_S", "5")
    assert watch.stopped_timeout_s() == 5


def test_a_rank_that_computes_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in other collectives, and one uses the processor: the job is not ended until it has stopped that."""
    job = Job(tmp_path)
    found = ranks("other_collective", {"files": BARRIER})
    used = [1.0]

    def answers(board: Board, local_ranks: Sequence[int]) -> list[Answer]:
        busy = Process("S", cpu_s=used[0] * job.now)
        return [found[0].answer, Answer(5, busy, found[1].answer.stacks, found[1].answer.trace)]

    job.watch._ask = answers
    monkeypatch.setattr(stacks, "process", lambda pid: Process("S", cpu_s=used[0] * job.now))
    assert job.look_for(40) == []
    assert "uses the processor" in job.said[0] or "The job is not ended." in job.said[0]
    used[0] = 0.0
    assert len(job.look_for(20)) >= 1
