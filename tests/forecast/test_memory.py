"""The memory and the exchanges of a plan, against real runs that are measured by other means."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.forecast.comparing import CONSTANT, planned, ran

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process")
LONG = pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="make test-faults runs it")
NAMES = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
}  # fmt: skip


def exchanged(plan: Any) -> list[str]:
    return [each.name for each in plan.recorded.steps if hasattr(each, "group_ranks")]


@pytest.mark.parametrize(
    "words",
    [
        "gpt",
        pytest.param("mlp precision=bf16-mixed", marks=LONG),
        pytest.param("mlp precision=bf16-true", marks=LONG),
        pytest.param("gpt precision=bf16-mixed", marks=LONG),
        pytest.param("gpt precision=bf16-true", marks=LONG),
        pytest.param("gpt accumulate=3 clip=1.0", marks=LONG),
        pytest.param("gpt ema", marks=LONG),
        pytest.param("gpt checkpointed", marks=LONG),
        pytest.param("cnn", marks=LONG),
    ],
)
def test_the_peak_of_one_process(words: str, tmp_path: Path) -> None:
    """Torch's allocator reports what the real run takes."""
    plan, real = planned(tmp_path, *words.split()), ran(tmp_path, *words.split())
    assert abs(plan.peak.total - real["peak"]) <= CONSTANT + 0.01 * real["peak"]
    assert sum(plan.peak.kinds.values()) == plan.peak.total
    assert plan.unreadable == {}


@pytest.mark.parametrize(
    "words",
    [
        "gpt strategy=fsdp",
        pytest.param("gpt strategy=ddp", marks=LONG),
        pytest.param("gpt strategy=ddp precision=bf16-mixed accumulate=2 clip=1.0 ema", marks=LONG),
        pytest.param("gpt strategy=fsdp_window accumulate=2", marks=LONG),
        pytest.param("gpt strategy=fsdp precision=bf16-mixed accumulate=2 clip=1.0 checkpointed", marks=LONG),
        pytest.param("gpt strategy=tp", marks=LONG),
        pytest.param("mlp strategy=tp clip=1.0", marks=LONG),
        pytest.param("cnn strategy=fsdp", marks=LONG),
    ],
)
def test_live_tensors_and_exchanges_of_two_ranks(words: str, tmp_path: Path) -> None:
    """The real rank walks over its tensors at hooks, where a saved tensor is one that Python knows."""
    given = [*words.split(), "devices=2"]
    plan, real = planned(tmp_path, *given, devices=2), ran(tmp_path, *given, devices=2, walks=True)
    for hook, size in real["live"].items():
        assert abs(plan.live[hook] - size) <= CONSTANT + 0.01 * size, hook
    there = [each.split("::")[1] for each in real["collectives"]]
    assert exchanged(plan) == [NAMES.get(each, each) for each in there]


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
