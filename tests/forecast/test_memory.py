"""The memory and the exchanges of a plan, against real runs that are measured by other means."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forecast.comparing import CONSTANT, planned, ran

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process")
LONG = pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="make test-faults runs it")
RANKS = {
    "auto": (1,), "ddp": (1, 2), "fsdp": (1, 2), "fsdp_window": (1, 2), "tp": (2,), "cp": (2,), "tp_fsdp": (4,),
}  # fmt: skip
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OPTIONS = ("accumulate=2", "clip=1.0", "ema", "checkpointed")
QUICK = [("gpt", 1), ("gpt strategy=fsdp", 2)]
"""What ``make test`` runs."""


def grid() -> Iterator[Any]:
    """Yield words and ranks: all models, strategies and precisions without options and with all of them together, and a
    GPT with each option alone.
    """
    for strategy, counts in RANKS.items():
        for ranks in counts:
            for model, precision in itertools.product(("gpt", "mlp", "cnn"), PRECISIONS):
                for options in ("", " ".join(OPTIONS)):
                    yield f"{model} strategy={strategy} precision={precision} {options}".strip(), ranks
            yield from ((f"gpt strategy={strategy} {option}", ranks) for option in OPTIONS)


@pytest.mark.parametrize(
    ("words", "ranks"), [*QUICK, *(pytest.param(*each, marks=LONG) for each in grid())],
    ids=lambda each: str(each),
)  # fmt: skip
def test_live_tensors_and_exchanges_are_those_of_a_real_run(words: str, ranks: int, tmp_path: Path) -> None:
    """At the peak, as torch's allocator reports it; at hooks, as a walk over all tensors finds them, saved ones too.

    With exchanges, only the walk is compared: the report misses what the threads of Gloo free.
    """
    given = [*words.split(), f"devices={ranks}"]
    plan, real = planned(tmp_path, *given, devices=ranks), ran(tmp_path, *given, devices=ranks, walks=True)
    assert set(real["live"]) == {"start", "before backward", "after backward"}
    for hook, size in real["live"].items():
        assert abs(plan.live[hook] - size) <= CONSTANT + 0.01 * size, hook
    if ranks == 1:
        assert abs(plan.peak.total - real["peak"]) <= CONSTANT + 0.01 * real["peak"]
    found = [[each.name, each.bytes] for each in plan.recorded.steps if hasattr(each, "group_ranks")]
    assert found == real["exchanges"]
    assert sum(plan.peak.kinds.values()) == plan.peak.total
    assert plan.unreadable == {}


def test_a_plan_of_another_program_is_not_right(tmp_path: Path) -> None:
    """The control: the comparison tells a batch more from an equal one."""
    plan, real = planned(tmp_path, "gpt", "layers=3"), ran(tmp_path, "gpt")
    assert abs(plan.peak.total - real["peak"]) > CONSTANT + 0.01 * real["peak"]


def test_two_and_three_blocks_predict_eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = planned(tmp_path, "gpt", "layers=8")
    monkeypatch.setattr("drivetrain.forecast.blocks.FEWEST", 100)
    every = planned(tmp_path, "gpt", "layers=8")
    assert few.lists == (("blocks", 8),)
    assert every.lists == ()
    assert abs(few.peak.total - every.peak.total) <= 0.001 * every.peak.total
    assert few.peak.phase == every.peak.phase
    flops = [sum(getattr(each, "flops", 0) for each in plan.recorded.steps) for plan in (few, every)]
    assert abs(flops[0] - flops[1]) <= 0.01 * flops[1]
