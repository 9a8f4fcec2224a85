"""What ranks exchange by torch.distributed, and a process that has no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from drivetrain.compat.reductions import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _sync_ddp_if_available,
)


def test_alone_everything_stays_as_it_is() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert not _distributed_is_initialized()
    assert _sync_ddp_if_available(tensor) is tensor
    assert _all_gather_ddp_if_available(tensor) is tensor


@pytest.fixture
def group(tmp_path: Path, monkeypatch: Any) -> Iterator[None]:
    """A group of one, whose sums are those of two alike."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    reduce = dist.all_reduce

    def doubled(tensor: torch.Tensor, op: Any, group: Any = None) -> None:
        reduce(tensor, op, group)
        if op is dist.ReduceOp.SUM:
            tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", doubled)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    try:
        yield
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [(None, 6), ("sum", 6), ("mean", 3), ("avg", 3), ("MAX", 3), (dist.ReduceOp.SUM, 6), (dist.ReduceOp.AVG, 3)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_tensor_is_reduced_in_place(group: None, operation: Any, expected: int, dtype: torch.dtype) -> None:
    tensor = torch.tensor([3], dtype=dtype)
    assert _distributed_is_initialized()
    assert _sync_ddp_if_available(tensor, reduce_op=operation) is tensor
    assert tensor.tolist() == [expected]


def test_backends_by_device() -> None:
    assert _get_default_process_group_backend_for_device(torch.device("cpu")) == "gloo"
    assert _get_default_process_group_backend_for_device(torch.device("cuda")) == "nccl"
    assert _get_default_process_group_backend_for_device(torch.device("meta")) == "gloo"
