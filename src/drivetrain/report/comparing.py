"""The differences between two runs: settings, code, speed and curves."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from drivetrain.report.reading import Run

_LINES = 2000  # how many lines of hyperparameters to compare at most


def facts(run: Run) -> dict[str, dict[str, str]]:
    """Return what run.json tells about the start of a run's newest fit, as texts by section and name."""
    last = run.last
    plan = {str(row.get("what")): row.get("choice") for row in rows(last.get("plan"))}
    code = {name: value for name, value in mapping(last.get("code")).items() if name != "folder"}
    sections = {
        "Settings": mapping(last.get("settings")),
        "Plan": plan,
        "Environment": mapping(last.get("environment")),
        "Code": {"model": last.get("model"), **code} if last else {},
    }
    return {
        title: {str(name): str(value) for name, value in found.items() if value is not None}
        for title, found in sections.items()
    }


def differences(one: Run, other: Run) -> dict[str, Any]:
    """Return the differences between two runs. The result has both values by section and name; "" stands for a missing
    value.
    """
    first, second = facts(one), facts(other)
    found: dict[str, Any] = {}
    for title in first:
        names = [*dict.fromkeys([*first[title], *second[title]])]
        pairs = {name: (first[title].get(name, ""), second[title].get(name, "")) for name in names}
        found[title] = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    before, after = (run.hparams.splitlines()[:_LINES] for run in (one, other))
    found["Hyperparameters"] = [*difflib.unified_diff(before, after, lineterm="", n=0)][2:]
    found["Speed"] = {"seconds_per_step": (one.step_s, other.step_s), "slower": slower(one, other)}
    values = summary(one), summary(other)
    found["Values"] = {name: (values[0].get(name), values[1].get(name)) for name in {**one.curves, **other.curves}}
    return found


def slower(one: Run, other: Run) -> float | None:
    """Return how much slower a step of ``other`` is: 0.1 means 10 % more time than a step of ``one``. Return ``None``
    if a time is unknown.
    """
    return other.step_s / one.step_s - 1 if one.step_s and other.step_s else None


def summary(run: Run) -> dict[str, dict[str, float]]:
    """Return each curve's last, lowest and highest value, with the steps of the lowest and the highest one."""
    found = {}
    for name, points in run.curves.items():
        known = [(x, y) for x, y in points if y == y]
        if known:
            low, high = min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])
            found[name] = {
                "last": known[-1][1], "lowest": low[1], "lowest_at": low[0], "highest": high[1], "highest_at": high[0],
            }  # fmt: skip
    return found


def mapping(value: Any) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, otherwise an empty mapping: a user may have edited run.json."""
    return value if isinstance(value, Mapping) else {}


def rows(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings in ``value``. If ``value`` is no list, return an empty list."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
