"""A rank of a pipeline is planned alone, and compared with real ranks that send and receive."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forecast.comparing import CONSTANT, planned, ran
from tests.forecast.planning import Said

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process")
LONG = pytest.mark.skipif(os.environ.get("DRIVETRAIN_FAULTS", "") != "long", reason="make test-faults runs it")
NAMES = {"send": "send", "recv_": "recv", "broadcast_": "broadcast", "allreduce_": "all_reduce"}


@pytest.mark.parametrize(
    "words",
    [
        "mlp strategy=1f1b",
        pytest.param("mlp strategy=1f1b precision=bf16-mixed clip=1.0 accumulate=2", marks=LONG),
        pytest.param("mlp strategy=gpipe layers=5", marks=LONG),
        pytest.param("mlp strategy=interleaved_1f1b layers=4", marks=LONG),
    ],
)
def test_the_peak_and_the_exchanges_of_each_rank(words: str, tmp_path: Path) -> None:
    given = [*words.split(), "devices=2"]
    ran(tmp_path, *given, devices=2)
    for rank in range(2):
        real = json.loads((tmp_path / f"real.{rank}").read_text())
        plan = planned(tmp_path, *given, devices=2, rank=rank)
        assert abs(plan.peak.total - real["peak"]) <= CONSTANT + 0.01 * real["peak"], rank
        there = Counter(
            NAMES.get(name, name) for each, _ in real["exchanges"] for name in [each.removeprefix("c10d::")]
        )
        here = Counter(each.name for each in plan.recorded.steps if hasattr(each, "group_ranks"))
        assert {name: here[name] for name in ("send", "recv")} == {name: there[name] for name in ("send", "recv")}


PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from drivetrain import LightningModule, Trainer
from drivetrain.strategies import PipelineStrategy

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 300), *[nn.Linear(300, 300) for _ in range(10)], nn.Linear(300, 5))

    def configure_pipeline(self, num_stages):
        each = len(self.layers) // num_stages
        return [self.layers[at * each:(at + 1) * each] for at in range(num_stages)], nn.functional.cross_entropy

    def training_step(self, batch, batch_idx):
        raise AssertionError("a pipeline calls the stages")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = [(torch.ones(30), 1)] * 80
Trainer(max_steps=10, strategy=PipelineStrategy(num_microbatches=8)).fit(Net(), DataLoader(data, batch_size=8))
"""


def test_the_classes_of_a_pipeline_are_its_first_and_last_rank_and_those_between(plan: Callable[..., Said]) -> None:
    said = plan(PROGRAM, "--devices", "4", "--device", "H100 80GB", "--json")
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    classes = {each["ranks"]: each for each in found["classes"]}
    assert sorted(classes) == ["0", "1-2", "3"]
    assert found["peak"] == max(each["peak"] for each in classes.values()) == classes["1-2"]["peak"]
    assert (found["rank"], found["fits"]) == (1, True)
    assert {each["name"]: each["count"] for each in found["exchanges"]} == {"send": 16, "recv": 16}
    assert "of the pipeline's bubble" in found["time"]
