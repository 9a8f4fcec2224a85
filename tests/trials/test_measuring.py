"""The judgement on speeds that are given as numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.proof.runs import CannotTryError
from drivetrain.trials.measuring import Result, Trials, Tried, judge


@pytest.mark.parametrize(
    ("unchanged", "changed", "helps"),
    [
        ([100, 101, 99], [300, 310, 305], True),
        ([100, 101, 99], [108, 109, 107], True),
        ([100, 101, 99], [100, 99, 101], False),  # the same
        ([100, 101, 99], [50, 51, 49], False),  # slower
        ([100, 101, 99], [300, 310, 100], False),  # faster in two rounds of three
        ([100, 200, 100], [180, 360, 180], False),  # faster in each, but less than the program differs from itself
        ([100, 200, 100], [210, 420, 210], True),
        ([100, 100, 100], [103, 103, 103], False),  # too little for a changed program
        ([100], [300], False),  # one round has no spread
    ],
)
def test_a_cure_helps_if_its_smallest_gain_exceeds_the_spread_of_the_unchanged_program(
    unchanged: list[float], changed: list[float], helps: bool
) -> None:
    assert judge(unchanged, changed).helps is helps


def test_the_ratio_is_the_median_of_those_of_each_round() -> None:
    found = judge([100, 200, 100], [200, 300, 300])
    assert (found.low, found.ratio, found.high) == (1.5, 2.0, 3.0)


def test_what_helps_is_ordered_by_the_ratio() -> None:
    speeds = {"a": [200.0, 200.0], "b": [300.0, 310.0], "c": [99.0, 99.0]}
    cures = [Tried(name, "", "", "", each, judge([100, 100], each)) for name, each in speeds.items()]
    cures += [Tried("d", "", "", "not here"), Tried("e", "", "", "", failed="RuntimeError: no")]
    assert [each.name for each in Result([100, 100], cures).helpful()] == ["b", "a"]


def test_a_value_that_no_change_has_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = {"cures": [{"name": name} for name in ("num_workers=1", "num_workers=2", "pin_memory")]}
    trials = Trials(["train.py"], tmp_path, 4, 60.0, print)
    monkeypatch.setattr(trials, "_trial", lambda where, looks=False: (looked if looks else pytest.fail(where), 1.0))
    with pytest.raises(CannotTryError, match="^--only num_workers=3 names no change of this program. Write one of num"):
        trials.run(Result(), 2, ["num_workers=3", "pin_memory"])


def test_nothing_is_measured_if_no_change_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = {"cures": [{"name": "pin_memory", "write": "", "note": "", "why_not": "no effect"}]}
    trials = Trials(["train.py"], tmp_path, 4, 60.0, print)
    monkeypatch.setattr(trials, "_trial", lambda where, looks=False: (looked if looks else pytest.fail(where), 1.0))
    with pytest.raises(CannotTryError, match=r"^no change applies to it\. pin_memory: no effect\.$"):
        trials.run(Result(), 3, ["pin_memory"])
