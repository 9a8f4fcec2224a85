"""The kits: each finds planted defects, and drivetrain's own parts pass them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance import planted
from tests.conformance.planted import DEFECTS

from drivetrain.base.registry import load
from drivetrain.testing import check_part
from drivetrain.testing.checks import REGISTRIES, CannotTryError, Outcome, Part, path_of, run_checks

LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
SLOW = {"accelerator", "launcher", "strategy"}
"""Kinds whose parts train in processes of their own, for minutes."""


def only_in_long_form(slow: bool) -> None:
    if slow and not LONG:
        pytest.skip("takes seconds to minutes: make test-faults")


# ---- planted defects -------------------------------------------------------------------------------------------------


def outcome(part: Any, kind: str, check: str) -> Outcome:
    found = [*run_checks(Part(kind, path_of(part), factory=part), check)]
    assert [each.name for each in found] == [check]
    return found[0]


def test_there_are_planted_defects_of_every_kind() -> None:
    assert {kind for kind, _, _ in DEFECTS.values()} == set(REGISTRIES)
    assert len(DEFECTS) >= 20


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda each: each.__name__)
def test_a_planted_defect_fails_the_check_about_it_and_its_twin_does_not(defect: type) -> None:
    kind, twin, check = DEFECTS[defect]
    only_in_long_form(kind == "launcher")
    found = outcome(defect, kind, check)
    assert found.result == "fails"
    assert found.seen
    assert outcome(twin, kind, check).result == "ok"


@pytest.mark.parametrize(
    ("kind", "twin"),
    [
        ("cluster", planted.Cluster), ("logger", planted.Lines), ("logger", planted.Resumes),
        ("store", planted.Memory), ("precision", planted.Scaled), ("precision", planted.Adapts),
        ("loader", planted.Batches),
    ],
)  # fmt: skip
def test_a_part_without_a_defect_passes_all_checks(kind: str, twin: type) -> None:
    assert {each.result for each in check_part(kind, twin)} <= {"ok", "skipped"}


# ---- drivetrain's own parts ------------------------------------------------------------------------------------------

ARGUMENTS = {
    "model_parallel": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
}


def names() -> Iterator[Any]:
    """Each class with its arguments once, by its first name; start methods of a strategy make no difference here."""
    for kind, registry in REGISTRIES.items():
        seen = set()
        for entry in load(registry).entries() if registry else ():
            own = kind if kind == "strategy" else f"{dict(entry.init_params)}"
            if entry.cls.__module__.startswith("drivetrain.") and (entry.cls, own) not in seen:
                seen.add((entry.cls, own))
                yield pytest.param(kind, entry.name, id=f"{kind}-{entry.name}")


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *names(),
        pytest.param("store", "drivetrain.checkpoints.background:AsyncCheckpointIO", id="store-background"),
        pytest.param("loader", "torch.utils.data:DataLoader", id="loader-DataLoader"),
        pytest.param("loader", "tests.conformance.planted:several_loaders", id="loader-CombinedLoader"),
    ],
)
@pytest.mark.timeout(300)
def test_a_part_of_drivetrains_own_passes(kind: str, part: str) -> None:
    only_in_long_form(kind in SLOW or (kind == "precision" and part not in ("32", "64")))
    try:
        outcomes = check_part(kind, part, ARGUMENTS.get(part))
    except CannotTryError as why:
        pytest.skip(str(why))
    assert "ok" in {each.result for each in outcomes}
