"""How long ranks may go on after one has failed: it depends on why, and on who has something to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.launchers._ending import Ending
from drivetrain.launchers.board import SAVE_BEGINS_S, SAVES, SAVING, Board, Sheet

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
