"""What ModelParallelStrategy says of the torch that it runs on. tests/distributed has its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.strategies import ModelParallelStrategy, model_parallel
from drivetrain.strategies.fully_sharded import FullySharded


@pytest.mark.parametrize(("sizes", "warns"), [((2, 2), True), ((1, 2), False), ((2, 1), False)])
def test_both_kinds_together_are_warned_of_with_a_torch_whose_numbers_were_wrong(
    sizes: tuple[int, int], warns: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    strategy: Any = ModelParallelStrategy()
    monkeypatch.setattr(ModelParallelStrategy, "sizes", sizes)
    monkeypatch.setattr(ModelParallelStrategy, "_split", lambda self, module: None)
    monkeypatch.setattr(ModelParallelStrategy, "_share", lambda self, module: None)
    monkeypatch.setattr(FullySharded, "_shard", lambda self, module: None)
    monkeypatch.setattr(model_parallel, "torch_version", lambda: (2, 13))
    strategy._shard(nn.Linear(2, 2))
    assert not recwarn.list
    monkeypatch.setattr(model_parallel, "torch_version", lambda: (2, 9))
    strategy._shard(nn.Linear(2, 2))
    assert [f"This is torch {torch.__version__}. Use torch 2.13" in str(each.message) for each in recwarn.list] == (
        [True] if warns else []
    )
