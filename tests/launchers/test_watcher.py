"""What the watcher says of ranks that another launcher has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.launchers.board import PHASE, SHOWN, Board, Sheet
from drivetrain.launchers.child import write_failure
from drivetrain.launchers.watcher import _Ranks
from drivetrain.loops.progress import Phase


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.NONE])
def test_a_rank_that_ends_well_in_the_middle_of_a_run_is_named_before_those_that_lose_it(
    tmp_path: Path, phase: Phase
) -> None:
    board = Board(tmp_path, [0, 1], 2)
    words = Sheet(tmp_path, 1).words
    words[SHOWN], words[PHASE] = 1, phase
    write_failure(tmp_path, 0, RuntimeError("Connection closed by peer"))
    ranks = _Ranks(board)
    ranks._ended = [1, 0]
    named = "Rank 1 of 2" if phase else "Rank 0 of 2"  # a rank that has come through its run has not failed
    assert ranks._report(ranks._failed()).startswith(named)
