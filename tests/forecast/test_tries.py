"""The changes that a plan tries: which ones, what to write, and what a program with the change really takes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.forecast import programs
from tests.forecast.comparing import CONSTANT, ran, whole_plan
from torch.utils.data import DataLoader

from drivetrain.data.combined import CombinedLoader
from drivetrain.forecast.standins import Job, refused_strategy
from drivetrain.forecast.tries import Planner, cause
from drivetrain.forecast.windows import first_batch
from drivetrain.strategies import (
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    PipelineStrategy,
    SingleDeviceStrategy,
)  # fmt: skip

LONG = pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="make test-faults runs it")
ALWAYS = ["bf16-mixed", "bf16-true", "half the micro-batch", "recomputed activations"]


def changes(strategy: Any, job: Job, model: Any = None, precision: str = "32-true") -> dict[str, Any]:
    model = programs.model("gpt", {}) if model is None else model
    planner = Planner(job, None, "program.py", {})
    planner._trainer = SimpleNamespace(
        strategy=strategy, plan=SimpleNamespace(precision=SimpleNamespace(name=precision)),
        limits=SimpleNamespace(accumulate=2),
    )  # fmt: skip
    planner._started = SimpleNamespace(model=model)
    return {each.name: each for each in planner.changes()}


def test_what_is_tried_for_ddp() -> None:
    found = changes(DDPStrategy(), Job(16, 8))
    assert list(found) == [*ALWAYS, "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "offload", "tp"]
    assert found["FULL_SHARD"].write == 'Trainer(strategy="fsdp")'
    assert found["tp"].write == "Trainer(strategy=ModelParallelStrategy(tensor_parallel_size=8))"
    assert "Trainer(accumulate_grad_batches=4)" in found["half the micro-batch"].write
    assert [each.failed for each in found.values()] == [""] * len(found)


def test_what_the_program_has_already_is_not_tried() -> None:
    found = changes(FSDPStrategy(cpu_offload=True, activation_checkpointing_policy={programs.Block}), Job(8, 8))
    assert list(found) == ["bf16-mixed", "bf16-true", "half the micro-batch", "SHARD_GRAD_OP", "tp"]
    assert found["tp"].write.endswith("(tensor_parallel_size=4))")  # the rest shards
    kept = found["SHARD_GRAD_OP"].arguments["strategy"].options
    assert kept.activation_checkpointing_policy == {programs.Block}
    assert list(changes(ModelParallelStrategy(2, 2), Job(4, 4), precision="bf16-true")) == ALWAYS[2:]
    assert list(changes(SingleDeviceStrategy(), Job(1, 1))) == ALWAYS


def test_tensor_parallelism_needs_a_plan_of_the_module() -> None:
    model = programs.model("gpt", {})
    model.tp_plan = {}
    assert "declares no tp_plan" in changes(DDPStrategy(), Job(8, 8), model)["tp"].failed


class OwnStep(PipelineStrategy):
    def bind_step(self, parts: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (DataParallelStrategy(), "trains on all devices in one process"),
        (OwnStep(), "runs the steps itself"),
        (PipelineStrategy(), None),
        (DDPStrategy(), None),
        (FSDPStrategy(), None),
        (ModelParallelStrategy(), None),
        (SingleDeviceStrategy(), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_strategies_are_refused_for_what_they_declare(strategy: Any, why: str | None) -> None:
    refused = refused_strategy(strategy)
    assert refused is None if why is None else why in (refused or "")


WORDS = {
    "bf16-mixed": "strategy=ddp precision=bf16-mixed", "bf16-true": "strategy=ddp precision=bf16-true",
    "half the micro-batch": "strategy=ddp batch_size=4 accumulate=2",
    "recomputed activations": "strategy=ddp checkpointed", "SHARD_GRAD_OP": "strategy=shard_grad_op",
    "FULL_SHARD": "strategy=fsdp", "HYBRID_SHARD": "strategy=hybrid", "offload": "strategy=fsdp_cpu_offload",
    "tp": "strategy=tp_fsdp",
}  # fmt: skip
"""The changed programs."""


@LONG
@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process")
def test_each_change_takes_what_the_changed_program_takes(tmp_path: Path) -> None:
    """On two planned machines with two ranks each, and on four real ranks."""
    found = whole_plan(tmp_path, "gpt", "strategy=ddp", "devices=4", devices=4, per_node=2, tries=True)
    told = {each.name: each for each in found["changes"]}
    assert set(told) == set(WORDS)
    for name, words in WORDS.items():
        plan = told[name].found
        assert plan is not None, told[name].failed
        real = ran(tmp_path, "gpt", *words.split(), "devices=4", devices=4, walks=True)
        for hook, size in real["live"].items():
            assert abs(plan.live[hook] - size) <= CONSTANT + 0.01 * size, (name, hook)
        exchanges = [[each.name, each.bytes] for each in plan.recorded.steps if hasattr(each, "group_ranks")]
        assert exchanges == real["exchanges"], name


@LONG
@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process")
def test_changes_are_tried_together_if_none_fits_alone(tmp_path: Path) -> None:
    found = whole_plan(tmp_path, "mlp", "strategy=ddp", "devices=4", devices=4, per_node=4, memory=1, tries=None)
    together = [each for each in found["changes"] if " + " in each.name]
    alone = [each.found.peak.total for each in found["changes"] if " + " not in each.name and each.found]
    assert together
    assert all(each.found is not None for each in together), [each.failed for each in together]
    assert min(each.found.peak.total for each in together) < min(alone)
    assert found["largest"] == 0


def test_what_torch_says_of_a_device_that_is_not_there_gets_a_cure() -> None:
    told = cause(RuntimeError("PyTorch is not linked with support for cuda devices\nmore"))
    assert told.endswith("cuda devices A plan has no devices: write self.device where the program names one.")
    assert cause(RuntimeError("no such column\nmore")) == "RuntimeError: no such column"


def test_the_first_batch_of_loaders_has_their_form() -> None:
    one, other = (DataLoader(torch.full((2,), each), batch_size=2) for each in (1.0, 2.0))
    both = {"a": one, "b": DataLoader(torch.ones(4), batch_size=3)}
    assert first_batch(one).tolist() == [1, 1]
    assert {name: each.tolist() for name, each in first_batch(both).items()} == {"a": [1, 1], "b": [1, 1, 1]}
    assert [each.tolist() for each in first_batch(CombinedLoader([one, other], "min_size"))] == [[1, 1], [2, 2]]
