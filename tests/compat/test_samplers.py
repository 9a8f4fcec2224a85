"""Samples shared out to ranks; and DDP asked to average a backward pass that began outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

from drivetrain.compat.samplers import (
    DistributedSamplerWrapper,
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
    prepare_for_backward,
)
from drivetrain.errors import ConfigurationError


def parts(cls: Any, dataset: Any, ranks: int, **arguments: Any) -> list[list[Any]]:
    """What each rank gets."""
    samplers = [cls(dataset, num_replicas=ranks, rank=rank, **arguments) for rank in range(ranks)]
    found = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in found]
    return found


def test_no_sample_is_given_twice() -> None:
    assert parts(UnrepeatedDistributedSampler, range(7), 3, shuffle=False) == [[0, 3, 6], [1, 4], [2, 5]]
    assert parts(UnrepeatedDistributedSampler, [], 2) == [[], []]
    with pytest.raises(ConfigurationError, match="2 samples for 3 ranks"):
        parts(UnrepeatedDistributedSampler, range(2), 3)


def test_the_order_depends_on_the_epoch_only() -> None:
    first = UnrepeatedDistributedSampler(range(7), 1, 0, seed=5)  # type: ignore[arg-type]
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2)).tolist()
    first.set_epoch(2)
    assert list(first) == order


def test_a_sampler_is_shared_out_too() -> None:
    odd = SequentialSampler([10, 20, 30])
    assert parts(UnrepeatedDistributedSamplerWrapper, odd, 2, shuffle=False) == [[0, 2], [1]]
    assert parts(DistributedSamplerWrapper, odd, 2, shuffle=False) == [[0, 2], [1, 0]]  # the control


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("finds_unused", [False, True])
def test_gradients_of_a_pass_around_the_wrapper_are_averaged(finds_unused: bool) -> None:
    module = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    model = DistributedDataParallel(module, find_unused_parameters=finds_unused)
    averaged: list[Any] = []
    model.register_comm_hook(None, lambda state, bucket: averaged.append(bucket) or bucket_of(bucket))
    used = list(module)[:1] if finds_unused else list(module)
    for count in (1, 2):
        loss = sum(layer(torch.ones(1, 2)).sum() for layer in used)
        prepare_for_backward(model, {"loss": loss})
        loss.backward()  # type: ignore[union-attr]
        assert len(averaged) == count
    with model.no_sync():
        loss = module[0](torch.ones(1, 2)).sum()
        prepare_for_backward(model, loss)
        loss.backward()
    assert len(averaged) == 2
    assert model.require_forward_param_sync is False


def bucket_of(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
