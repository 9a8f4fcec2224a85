"""What the forecast of time needs of a record: arithmetic of attention, no kernels where there are none, waits."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forecast.records import steps_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from drivetrain.forecast import torch_tools
from drivetrain.forecast.ledger import Lines, Recorder
from drivetrain.forecast.operations import Exchange, Ledger, Operation
from drivetrain.forecast.torch_tools import fake_mode
from drivetrain.forecast.values import UnreadableError, Values

PROGRAM = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
import drivetrain as dt

class Model(dt.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(int(sys.argv[2]))])

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = dt.Trainer(max_epochs=1, devices=4, strategy=sys.argv[1], logger=False, accelerator="auto")
trainer.fit(Model(), DataLoader(torch.randn(32, 64), batch_size=2))
"""


def recorded(function: Any) -> list[Operation]:
    ledger = Ledger()
    with torch_tools.fake_mode(), Recorder(ledger, Lines(lambda path: False), Values({})):
        function()
    return [each for each, _ in ledger.steps]


def attention(is_causal: bool) -> list[Operation]:
    def run() -> None:
        q, k, v = (torch.empty(2, 4, 16, 8, requires_grad=True) for _ in range(3))
        scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward()

    return [each for each in recorded(run) if "attention" in each.name]


def test_attention_counts_its_matrices_and_causal_attention_half_of_them() -> None:
    """2 x 4 heads, 16 tokens of 8 numbers: a product has 2 * 8 * 16 * 16 * 8 operations; forward 2, backward 5."""
    product = 2 * 8 * 16 * 16 * 8
    assert [each.flops for each in attention(is_causal=False)] == [2 * product, 5 * product]
    assert [each.flops for each in attention(is_causal=True)] == [product, 5 * product // 2]


def test_only_kernels_are_recorded() -> None:
    def run() -> None:
        x = torch.empty(4, 4)
        with torch.profiler.record_function("part"):
            assert x.device.type == "cpu"
            (x + 1).view(16)

    assert [each.name for each in recorded(run)] == ["aten.add"]


def window_of(programs: Any, folder: Path, strategy: str, layers: int = 2) -> list[Any]:
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    return steps_of(programs, folder, 4, program, strategy, str(layers))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child process copies itself")
def test_parameters_are_waited_for_where_they_are_copied_out(programs: Any, tmp_path: Path) -> None:
    steps = window_of(programs, tmp_path, "fsdp")
    gathers = [(at, each) for at, each in enumerate(steps) if isinstance(each, Exchange) and each.name == "all_gather"]
    assert len(gathers) > 2
    for at, gather in gathers:
        assert steps[at - 1].name == "fsdp.all_gather_copy_in"
        assert steps[gather.waited_on_at].name == "fsdp.split_with_sizes_copy"
    assert len({gather.waited_on_at for _, gather in gathers}) == len(gathers)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child process copies itself")
def test_buckets_of_ddp_are_waited_for_after_the_matrices_of_the_backward_pass(programs: Any, tmp_path: Path) -> None:
    steps = window_of(programs, tmp_path, "ddp")
    reduced = [each for each in steps if isinstance(each, Exchange)]
    assert [each.name for each in reduced] == ["all_reduce"]
    matrices = [at for at, each in enumerate(steps) if isinstance(each, Operation) and each.flops]
    updates = [at for at, each in enumerate(steps) if each.phase == "optimizer"]
    assert steps[matrices[-1]].phase == "backward"
    assert matrices[-1] < reduced[0].waited_on_at <= updates[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the child process copies itself")
def test_a_model_of_many_blocks_has_the_exchanges_of_all_of_them(programs: Any, tmp_path: Path) -> None:
    """12 blocks, of which 2 and 3 are measured: each is gathered twice and reduced once; the rest has no parameters."""
    steps = window_of(programs, tmp_path, "fsdp", 12)
    found = Counter((each.name, each.phase) for each in steps if isinstance(each, Exchange))
    gathered = {("all_gather", "forward"): 12, ("all_gather", "backward"): 12, ("reduce_scatter", "backward"): 12}
    assert found == gathered
    for at, each in enumerate(steps):
        if isinstance(each, Exchange) and each.name == "all_gather":
            assert at < each.waited_on_at
            assert steps[each.waited_on_at].name == "fsdp.split_with_sizes_copy"


def test_a_sparse_gradient_is_refused_with_its_line() -> None:
    """Its size depends on values."""
    with fake_mode(), Recorder(Ledger(), Lines(lambda path: path == __file__), Values(None)):
        loss = nn.Embedding(9, 4, sparse=True)(torch.zeros(3, dtype=torch.int64)).sum()
        with pytest.raises(UnreadableError, match="sparse=False"):
            loss.backward()
