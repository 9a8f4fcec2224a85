"""The judgement on speeds that are given as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    looked = {"steps": 4, "cures": [{"name": name} for name in ("num_workers=1", "num_workers=2", "pin_memory")]}
    trials = Trials(["train.py"], tmp_path, 4, 60.0, print)
    monkeypatch.setattr(trials, "_trial", lambda where, looks=False: (looked if looks else pytest.fail(where), 1.0))
    with pytest.raises(CannotTryError, match="^--only num_workers=3 names no change of this program. Write one of num"):
        trials.run(Result(), 2, ["num_workers=3", "pin_memory"])


def test_nothing_is_measured_if_no_change_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = {"steps": 4, "cures": [{"name": "pin_memory", "write": "", "note": "", "why_not": "no effect"}]}
    trials = Trials(["train.py"], tmp_path, 4, 60.0, print)
    monkeypatch.setattr(trials, "_trial", lambda where, looks=False: (looked if looks else pytest.fail(where), 1.0))
    with pytest.raises(CannotTryError, match=r"^no change applies to it\. pin_memory: no effect\.$"):
        trials.run(Result(), 3, ["pin_memory"])


def trials_of(
    speeds: dict[str, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Trials, list[str]]:
    """Trials of cures with these speeds, one after the other; and what they print."""
    said: list[str] = []
    trials, left = (
        Trials(["train.py"], tmp_path, None, 60.0, said.append),
        {name: [*each] for name, each in speeds.items()},
    )
    cures = [{"name": name, "write": "", "note": "", "why_not": ""} for name in speeds if name != "unchanged"]

    def trial(where: str, cure: Any = None, looks: bool = False) -> tuple[dict[str, Any], float]:
        if looks:
            return {"cures": cures, "steps": 70}, 6.0
        return {"samples_per_s": left[where.partition(": ")[2]].pop(0)}, 6.0

    monkeypatch.setattr(trials, "_trial", trial)
    return trials, said


def test_a_change_is_not_tried_again_when_it_cannot_help_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {
        "unchanged": [100.0, 101.0, 99.0],
        "helps": [300.0, 310.0, 305.0],
        "slower": [90.0],
        "once": [200.0, 100.0],
    }
    trials, said = trials_of(speeds, tmp_path, monkeypatch)
    result = Result()
    trials.run(result, 3)
    assert [each.samples_per_s for each in result.cures] == [*speeds.values()][1:]
    assert [each.name for each in result.helpful()] == ["helps"]
    assert result.steps == 70
    assert said[0].startswith("3 changes to try: helps, slower, once. At most 12 trials: 1.2 minutes if each takes 6 s")


def test_the_rounds_end_when_nothing_can_help_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"unchanged": [100.0, 101.0], "slower": [90.0], "once": [200.0, 100.0]}
    trials, _ = trials_of(speeds, tmp_path, monkeypatch)
    result = Result()
    trials.run(result, 3)
    assert (len(result.samples_per_s), result.helpful()) == (2, [])
