"""Random training programs compute what a plain loop computes; the long form runs thousands of them."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.testing import check_against_plain_loop

pytestmark = pytest.mark.timeout(3600)  # the long form takes minutes


def test_random_programs_equal_the_plain_loop(long_form: bool, seed: int) -> None:
    check_against_plain_loop(2000 if long_form else 100, seed)


def check_on_this_rank(programs: int, seed: int) -> None:
    check_against_plain_loop(programs, seed, devices=2, strategy="ddp")


def test_two_processes_equal_the_plain_loop_over_their_global_batches(pool: Any, long_form: bool, seed: int) -> None:
    for first in range(seed, seed + (300 if long_form else 12), 12):
        pool.run(check_on_this_rank, 12, first, group=False)
