from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.loops.goodput import (
    FIRST_SAVE_S,
    PARTS,
    VERSION,
    WITHOUT_FAILURE_S,
    Report,
    account,
    best_interval_s,
    read,
)


def record(
    run: str, began: float, event: str, step: int, more: dict[str, Any], parts: dict[str, float]
) -> dict[str, Any]:
    seconds = {**dict.fromkeys(PARTS, 0.0), **parts}
    elapsed = sum(seconds.values())
    own = {"v": VERSION, "run": run, "pid": 1, "event": event, "time": began + elapsed, "elapsed": elapsed}
    return {**own, "step": step, "parts": seconds, **more}


def run_of(name: str, began: float, first_step: int, resumed: bool, *rest: tuple[Any, ...]) -> list[dict[str, Any]]:
    """A run whose start takes five seconds; each of ``rest`` is an event, a step, seconds by part, and an end's why."""
    records = [
        record(name, began, "begin", 0, {}, {"start": 4.0}),
        record(name, began, "train", first_step, {"resumed": resumed}, {"start": 5.0}),
    ]
    for event, step, parts, *why in rest:
        records.append(record(name, began, event, step, {"why": why[0]} if why else {}, {"start": 5.0, **parts}))
    return records


KILLED = run_of(
    "a", 1000.0, 0, False,
    ("save", 80, {"step": 70.0, "data": 10.0, "save": 2.0}),
    ("beat", 80, {"step": 70.0, "data": 10.0, "save": 2.0, "validation": 6.0}),
    ("beat", 100, {"step": 90.0, "data": 12.0, "save": 2.0, "validation": 6.0}),
)  # fmt: skip
RESUMED = run_of(
    "b", 1130.0, 80, True,
    ("save", 200, {"step": 120.0, "data": 5.0, "save": 3.0}),
    ("end", 200, {"step": 120.0, "data": 5.0, "save": 3.0}, "finished"),
)  # fmt: skip


def test_the_parts_add_up_to_the_wall_time_of_a_run_that_was_killed_and_resumed() -> None:
    report = account([*KILLED, *RESUMED])
    # the first run lasted 115 s and 15 s passed until the second; its work after the save of step 80 is lost
    assert report.seconds == {
        "step": 190.0, "data": 15.0, "validation": 0.0, "save": 5.0, "start": 10.0, "lost": 28.0, "idle": 15.0,
    }  # fmt: skip
    assert report.wall_s == sum(report.seconds.values()) == 1130 + 133 - 1000
    assert report.goodput == 190 / 263
    assert (report.runs, report.failures, report.saves, report.save_s, report.open) == (2, 1, 2, 5.0, False)
    assert report.failure_interval_s == 263 - 15


def test_a_run_that_was_killed_before_it_has_trained_loses_nothing_and_is_a_failure() -> None:
    stillborn = run_of("c", 1120.0, 0, True)[:1]
    report = account([*KILLED, *stillborn, *RESUMED])
    assert report.seconds["lost"] == 28.0
    assert (report.seconds["start"], report.failures) == (14.0, 2)
    assert report.wall_s == sum(report.seconds.values()) == 263


def test_without_a_record_of_the_save_the_lost_time_is_in_proportion_to_the_steps() -> None:
    later = run_of("b", 1130.0, 95, True, ("end", 95, {}, "finished"))
    report = account([*KILLED, *later])
    assert report.seconds["step"] == 70 + 0.75 * 20
    assert report.seconds["lost"] == 0.25 * 20 + 0.25 * 2


def test_work_is_lost_once_when_two_runs_resume_from_the_same_checkpoint() -> None:
    again = run_of("c", 1200.0, 80, True, ("beat", 90, {"step": 10.0}))
    once_more = run_of("d", 1220.0, 80, True, ("beat", 85, {"step": 5.0}))
    report = account([*KILLED, *again, *once_more])
    assert report.seconds["step"] == 75.0  # of the first run until 80, and of the last
    assert report.seconds["lost"] == 28.0 + 10.0
    assert report.wall_s == sum(report.seconds.values())


def test_a_new_start_repeats_the_work_of_a_run_that_has_failed() -> None:
    report = account([*KILLED, *run_of("b", 1130.0, 0, False, ("beat", 10, {"step": 9.0}))])
    assert (report.seconds["step"], report.seconds["lost"]) == (9.0, 110.0)


def test_a_new_start_after_the_end_is_a_new_training() -> None:
    report = account([*KILLED, *RESUMED, *run_of("c", 9000.0, 0, False, ("beat", 10, {"step": 9.0}))])
    assert (report.runs, report.wall_s, report.seconds["step"], report.open) == (1, 14.0, 9.0, True)


@pytest.mark.parametrize("why", ["finished", "exception"])
def test_a_run_that_continues_without_a_checkpoint_loses_what_lies_behind_its_first_step(why: str) -> None:
    first = run_of("a", 1000.0, 0, False, ("save", 8, {"step": 7.0}), ("end", 8, {"step": 8.0, "data": 1.0}, why))

    def lost(step: int, resumed: bool) -> tuple[int, float, float]:
        report = account([*first, *run_of("b", 1020.0, step, resumed, ("end", 28, {"step": 20.0}, "finished"))])
        assert report.wall_s == sum(report.seconds.values()) == 45.0
        return report.runs, report.seconds["step"], report.seconds["lost"]

    assert lost(8, resumed=False) == (2, 28.0, 0.0)
    assert lost(4, resumed=False) == (2, 23.5, 4.0 + 1.5)
    assert lost(8, resumed=True) == (2, 27.0, 2.0)


def test_exceptions_are_failures_and_requests_to_stop_are_not() -> None:
    def failures(why: str) -> int:
        return account(run_of("a", 0.0, 0, False, ("end", 5, {"step": 1.0}, why))).failures

    assert [failures(why) for why in ("exception", "stopped", "finished")] == [1, 0, 0]


def test_until_a_failure_was_seen_none_is_expected_for_as_long_as_there_was_none() -> None:
    assert Report().failure_interval_s == WITHOUT_FAILURE_S
    assert Report(wall_s=1e6).failure_interval_s == 1e6 + WITHOUT_FAILURE_S


def test_runs_at_the_same_time_are_noted() -> None:
    report = account([*KILLED, *run_of("b", 1050.0, 80, True)])
    assert report.overlaps == 1
    assert any("had ended" in note for note in report.notes())
    assert account([*KILLED, *RESUMED]).notes() == []


def test_lines_that_are_cut_damaged_or_of_another_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = [json.dumps(each).encode() for each in [*KILLED, *RESUMED]]
    newer = json.dumps({**KILLED[0], "v": VERSION + 1}).encode()
    values = {"elapsed": ["long", math.nan, math.inf, -math.inf, 1e300], "step": [10**400, -1]}
    wrong = [json.dumps({**KILLED[0], name: value}).encode() for name, own in values.items() for value in own]
    path.write_bytes(b"\n" + b"\n".join([lines[0][:30], *lines, b"\0" * 20, b"[1]", newer, *wrong, lines[-1][:-1]]))
    records, unread = read(path)
    assert records == [*KILLED, *RESUMED]
    assert unread == 12
    assert any("version: 12." in note for note in account(records, unread).notes())


def test_no_record_is_no_time() -> None:
    assert account([]).goodput == 0.0
    assert "0 runs" in account([]).line()


# ---- the interval between saves --------------------------------------------------------------------------------------


class Simulated:
    """A training on a machine that fails at random: its wall time for a policy, and what its ledger has seen."""

    def __init__(self, stall_s: float, failure_interval_s: float, restart_s: float, seed: int) -> None:
        self.stall_s, self.restart_s = stall_s, restart_s
        draw = random.Random(seed)
        self.failures = [draw.expovariate(1 / failure_interval_s) for _ in range(1000)]

    def wall_s(self, work_s: float, interval_of: Callable[[Report], float]) -> float:
        report, done, left, failures = Report(), 0.0, self.failures[0], iter(self.failures[1:])
        while done < work_s:
            interval_s = min(interval_of(report), work_s - done)
            if left > interval_s + self.stall_s:  # saved before the next failure
                left -= interval_s + self.stall_s
                done += interval_s
                report.wall_s += interval_s + self.stall_s
                report.saves, report.save_s = report.saves + 1, report.save_s + self.stall_s
            else:
                report.wall_s += left + self.restart_s
                report.failures, left = report.failures + 1, next(failures)
        return report.wall_s


@pytest.mark.parametrize(
    ("stall_s", "failure_interval_s", "restart_s"),
    [(20.0, 3600.0, 60.0), (0.05, 30.0, 2.0), (60.0, 1200.0, 300.0), (1.0, 50_000.0, 100.0)],
)
def test_the_automatic_interval_costs_at_most_a_fifth_more_than_the_best_of_a_sweep(
    stall_s: float, failure_interval_s: float, restart_s: float
) -> None:
    """Also with the failures and saves that the training itself has seen, from the first save on."""
    machines = [Simulated(stall_s, failure_interval_s, restart_s, seed) for seed in range(10)]
    work_s = 60 * failure_interval_s

    def overhead(interval_of: Callable[[Report], float]) -> float:
        return sum(each.wall_s(work_s, interval_of) - work_s for each in machines)

    formula = best_interval_s(stall_s, failure_interval_s)
    swept = {factor: overhead(lambda _, f=factor: f * formula) for factor in (0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 4)}  # type: ignore[misc]
    best = min(swept.values())
    assert overhead(lambda report: report.save_interval_s) <= 1.2 * best
    assert swept[1] <= 1.2 * best
    assert swept[4] > 1.2 * best  # the negative control


def test_the_first_save_comes_soon_to_measure_what_one_costs() -> None:
    assert Report().save_interval_s == FIRST_SAVE_S


def test_where_failures_come_faster_than_saves_the_interval_is_that_between_failures() -> None:
    assert best_interval_s(10.0, 4.0) == 4.0
    assert 0 < best_interval_s(7.9, 4.0) < 8
