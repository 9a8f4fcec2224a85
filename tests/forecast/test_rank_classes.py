"""Classes of ranks: uneven shards, and stages of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.forecast.planning import Said
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from drivetrain.forecast.command import numbers_of_ranks
from drivetrain.forecast.rank_classes import rank_classes

PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from drivetrain import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(30, {rows})

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

Trainer(max_steps=10, strategy="fsdp").fit(Net(), DataLoader(torch.ones(80, 30), batch_size=8))
"""


def planned(plan: Callable[..., Said], rows: int, *words: str) -> Any:
    said = plan(PROGRAM.format(rows=rows), "--devices", "4", "--device", "H100 80GB", *words)
    assert said.code == 0, said.err
    return json.loads(said.out) if "--json" in words else said.out


def test_uneven_shards_are_classes(plan: Callable[..., Said]) -> None:
    """Nine rows on four ranks: three, three, three and none."""
    found = planned(plan, 9, "--json")
    full, empty = found["classes"]
    assert (full["ranks"], empty["ranks"]) == ("0-2", "3")
    assert found["rank"] == full["rank"] == 0
    assert (found["peak"], found["needed"], found["fits"]) == (full["peak"], full["needed"], full["fits"])
    assert empty["peak"] < full["peak"]
    alone = planned(plan, 9, "--json", "--rank", "3")
    assert (alone["peak"], alone["rank"], alone["classes"]) == (empty["peak"], 3, [])


def test_even_shards_are_one_class(plan: Callable[..., Said]) -> None:
    assert planned(plan, 8, "--json")["classes"] == []


class Mesh:
    mesh = torch.arange(4).reshape(2, 2)


def module(*shards: Any) -> nn.Module:
    """A module whose parameters say that they are shards."""
    mesh = Mesh()
    made = nn.Module()
    for at, (shape, placements) in enumerate(shards):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.placements, parameter.device_mesh = placements, mesh  # type: ignore[attr-defined]
        made.register_parameter(f"p{at}", parameter)
    return made


@pytest.mark.parametrize(
    ("shards", "classes"),
    [
        ([((8, 3), (Shard(0), Replicate()))], ((0, 1, 2, 3),)),
        ([((3, 8), (Shard(0), Replicate()))], ((0, 1), (2, 3))),
        ([((3, 8), (Replicate(), Shard(0)))], ((0, 2), (1, 3))),
        ([((5,), (Shard(0), Shard(0)))], ((0,), (1, 2, 3))),
        ([((3, 8), (Shard(0), Replicate())), ((8, 3), (Replicate(), Shard(1)))], ((0,), (1,), (2,), (3,))),
    ],
)
def test_shards_are_cut_as_torch_cuts_them(shards: Any, classes: Any) -> None:
    """Five elements on two times two ranks: three and two, of these two and one, and one and one."""
    assert rank_classes(module(*shards), 4, {}, 1) == classes


def test_stages_of_a_pipeline() -> None:
    """Two pipelines of four stages; the second and the third stage have equal parameters."""
    stages = nn.Sequential(nn.Linear(9, 9), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(5, 5))
    owners = {f"{at}.{name}": at for at in range(4) for name in ("weight", "bias")}
    assert rank_classes(stages, 8, owners, 4) == ((0, 4), (3, 7), (1, 2, 5, 6))


def test_numbers_of_ranks() -> None:
    assert numbers_of_ranks([3]) == "3"
    assert numbers_of_ranks([0, 1, 2, 8]) == "0-2, 8"
    assert numbers_of_ranks(range(0, 12, 2)) == "0, 2, 4, 6, ... (6 ranks)"
