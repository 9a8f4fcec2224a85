"""What the private names of torch that several files need are for, on torch's own objects."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

from drivetrain.base import torch_private


def test_schedulers_inside_of_others_are_found() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    inner = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    for outer in (lr_scheduler.SequentialLR(optimizer, inner, [1]), lr_scheduler.ChainedScheduler(inner)):
        assert list(torch_private.schedulers_in(outer)) == inner
    assert list(torch_private.schedulers_in(inner[0])) == []


def test_a_marked_optimizer_does_not_let_its_scheduler_warn() -> None:
    seen = []
    for marks in (False, True):
        optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        if marks:
            torch_private.mark_as_stepped(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        seen.append(len(caught))
    assert seen == [1, 0]


def test_the_state_of_a_scaler_is_by_optimizer_and_empty_if_it_is_disabled() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = SGD([weight], lr=0.1), GradScaler("cpu")
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    assert "found_inf_per_device" in torch_private.states_of_scaler(scaler)[id(optimizer)]
    assert torch_private.states_of_scaler(GradScaler("cpu", enabled=False)) == {}


def test_views_of_a_storage_have_one_key() -> None:
    whole, other = torch.ones(4), torch.ones(4)
    keys = [torch_private.storage_key(each.untyped_storage()) for each in (whole, whole[1:], other)]
    assert keys[0] == keys[1] != keys[2]


def test_a_schema_names_what_is_written() -> None:
    schema = torch_private.schema_of(torch.ops.aten.add_.Tensor)
    assert [each.name for each in schema.arguments if each.is_write] == ["self"]


def test_buffers_that_are_not_saved_and_tensors_that_ddp_ignores_are_named() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert set(torch_private.non_persistent_buffers(module)) == {"made"}
    assert list(torch_private.names_ignored_by_ddp(module)) == []
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["kept"])
    assert list(torch_private.names_ignored_by_ddp(module)) == ["kept"]


def test_the_iterator_with_persistent_workers_is_read_and_set() -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert torch_private.kept_iterator(loader) is None
    iterator = iter(loader)
    assert torch_private.kept_iterator(loader) is iterator
    torch_private.keep_iterator(loader, None)
    assert torch_private.kept_iterator(loader) is None
    assert torch_private.kept_iterator([1, 2]) is None
