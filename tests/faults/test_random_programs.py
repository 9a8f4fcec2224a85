"""Random training programs compute what a plain loop computes; the long form runs thousands of them."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
from tests.random_programs.equivalence import check_against_plain_loop, differences, run_trainer
from tests.random_programs.programs import random_program

from drivetrain.loops import direct

pytestmark = pytest.mark.timeout(3600)  # the long form takes minutes


def test_random_programs_equal_the_plain_loop(long_form: bool, seed: int) -> None:
    check_against_plain_loop(2000 if long_form else 100, seed)


def test_programs_are_equal_with_and_without_direct_calls(monkeypatch: Any, long_form: bool, seed: int) -> None:
    """Both to the last bit; and direct calls must have been made in many of them, which draw what they override."""
    made: Counter[str] = Counter()
    bind = direct.bind

    def counted(run: Any, optimizer: Any) -> Any:
        calls = bind(run, optimizer)
        made["public" if calls is None else "direct"] += 1
        return calls

    monkeypatch.setattr(direct, "bind", counted)
    programs = 500 if long_form else 40
    for number in range(seed, seed + programs):
        program, found = random_program(number), []
        for switch in ("0", "1"):
            monkeypatch.setenv(direct.SWITCH, switch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(run_trainer(program))
        assert not differences(*found, 0.0), program
    assert made["direct"] > programs / 4


def check_on_this_rank(programs: int, seed: int) -> None:
    check_against_plain_loop(programs, seed, devices=2, strategy="ddp")


def test_two_processes_equal_the_plain_loop_over_their_global_batches(pool: Any, long_form: bool, seed: int) -> None:
    for first in range(seed, seed + (300 if long_form else 12), 12):
        pool.run(check_on_this_rank, 12, first, group=False)
