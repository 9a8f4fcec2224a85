"""How long ranks may go on after one has failed: it depends on why, and on who has something to save."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.launchers._ending import Ended, Ending
from drivetrain.launchers.board import SAVE_BEGINS_S, SAVES, SAVING, Board, Sheet
from drivetrain.launchers.failure import Failure
from drivetrain.launchers.launcher import LaunchError
from drivetrain.launchers.signals import Sent

STOP_S, ECHO_S = 600.0, 3.0


class Job:
    """Two ranks, and a clock that a test sets."""

    def __init__(self, folder: Path, saves: bool) -> None:
        self.now = 100.0
        board = Board(folder, range(2), 2)
        self.sheet = Sheet(folder, 0)
        self.sheet.words[SAVES] = int(saves)
        self.ending = Ending(board, STOP_S, ECHO_S, lambda: self.now)

    def left(self, **why: bool) -> float:
        """Seconds that rank 0 has, when rank 1 has ended."""
        self.ending.look([0], **{"asked": False, "failed": False, **why})
        return self.ending.deadline - self.now


@pytest.fixture
def job(tmp_path: Path) -> Callable[[bool], Job]:
    return lambda saves: Job(tmp_path, saves)


@pytest.mark.parametrize(
    ("saves", "why", "seconds"),
    [
        (False, {"failed": True}, 0.0),
        (False, {}, ECHO_S),
        (True, {"failed": True}, SAVE_BEGINS_S),
        (True, {}, SAVE_BEGINS_S),
        (False, {"asked": True}, STOP_S),
        (True, {"asked": True}, STOP_S),
        (False, {"asked": True, "failed": True}, 0.0),
    ],
)
def test_how_long_the_others_may_go_on(
    job: Callable[[bool], Job], saves: bool, why: dict[str, bool], seconds: float
) -> None:
    ours = job(saves)
    assert ours.ending.deadline == math.inf
    assert ours.left(**why) == seconds


def test_a_rank_that_saves_is_waited_for_as_long_as_ranks_have_to_stop(job: Callable[[bool], Job]) -> None:
    ours = job(True)
    ours.left(failed=True)
    ours.now += SAVE_BEGINS_S  # it has not begun yet
    assert ours.left(failed=True) == 0.0
    ours.sheet.words[SAVING] = 1
    assert ours.left(failed=True) > 0.0
    ours.now += STOP_S
    assert ours.left(failed=True) < 0.0


def test_only_the_first_look_is_the_time_to_pass_a_signal_on(job: Callable[[bool], Job]) -> None:
    ours = job(False).ending
    assert [ours.look([0], asked=True, failed=False) for _ in range(2)] == [True, False]


def test_without_a_board_nobody_is_known_to_save() -> None:
    ending = Ending(None, STOP_S, ECHO_S, lambda: 100.0)
    assert ending.look([], asked=False, failed=True)
    assert ending.deadline == 100.0


# ---- until all have ended --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [(Sent(), [signal.SIGTERM]), (Sent(signal.SIGINT, 150.0, 50.0), [])],
    ids=["to-a-rank", "to-the-launching-process"],
)
def test_a_signal_that_one_rank_got_is_passed_on_once_and_only_if_the_others_have_none(
    job: Callable[[bool], Job], sent: Sent, passed_on: list[int]
) -> None:
    ours, running, failed, signals = job(False), [0, 1], dict[int, Ended](), list[int]()
    turns = ours.ending.turns(running, failed, sent, signals.append)
    assert next(turns) == 0.5
    running.remove(1)
    failed[1] = Ended(Failure(0.0, "raised KeyboardInterrupt", interrupted=True))
    assert [next(turns), next(turns)] == [0.5, 0.5]
    assert signals == passed_on
    ours.now = min(ours.ending.deadline, sent.deadline)
    assert next(turns) == 0.0  # ranks that have ended by now are still found
    assert next(turns, None) is None
    assert running == [0]


def test_waiting_ends_when_all_ranks_have_ended(job: Callable[[bool], Job]) -> None:
    running = [0, 1]
    for _ in job(False).ending.turns(running, {}, Sent(), lambda number: None):
        running.pop()
    assert running == []


@pytest.mark.parametrize(
    ("failure", "code", "kind", "said"),
    [
        (Failure(0.0, "raised it", interrupted=True), 1, KeyboardInterrupt, ""),
        (Failure(0.0, "ended"), -signal.SIGINT, KeyboardInterrupt, ""),
        (Failure(0.0, "ended"), -signal.SIGTERM, SystemExit, ""),
        (Failure(0.0, "ended"), 128 + signal.SIGTERM, SystemExit, ""),
        (Failure(0.0, "raised it", "Mend it."), 3, LaunchError, "Rank 0 waits.\nRank 1 raised it\nMend it."),
    ],
)
def test_a_rank_that_was_asked_to_end_has_not_failed(
    failure: Failure, code: int, kind: type[BaseException], said: str
) -> None:
    error = Ended(failure, code).error(1, "Rank 1", ("Rank 0 waits.", ""))
    assert isinstance(error, kind)
    assert said in str(error)
    assert not isinstance(error, LaunchError) or (error.rank, error.exit_code) == (1, code)
