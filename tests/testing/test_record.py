"""When a recording is on, and what its record holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.testing import FakeAccelerator

HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)


def test_a_recording_leaves_torch_as_it_was() -> None:
    group, push = torch._C._group_tensors_by_device_and_dtype, torch._C._autograd._push_saved_tensors_default_hooks
    run = vars(torch.autograd)["_engine_run_backward"]
    with FakeAccelerator.recording() as record:
        assert torch._C._group_tensors_by_device_and_dtype is not group
        x = torch.ones(3, device=DEVICE)
    assert (torch._C._group_tensors_by_device_and_dtype, vars(torch.autograd)["_engine_run_backward"]) == (group, run)
    assert torch._C._autograd._push_saved_tensors_default_hooks is push
    assert (x.device, (x + torch.ones(3)).tolist()) == (HOST, [2, 2, 2])
    torch.optim.SGD([x], lr=0.1).step()
    assert (record.steps, record.syncs, record.moves) == ([], [], [])


def test_recordings_do_not_nest_and_end_by_exceptions() -> None:
    with FakeAccelerator.recording():  # noqa: SIM117  # the inner one is what fails
        with pytest.raises(ConfigurationError, match="simulated devices is running"), FakeAccelerator.recording():
            pass
    with pytest.raises(ZeroDivisionError), FakeAccelerator.recording():
        raise ZeroDivisionError
    with FakeAccelerator.recording() as record:
        torch.ones(1).to(DEVICE)
    assert len(record.moves) == 1


def test_a_step_of_a_class_that_calls_another_is_one() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with FakeAccelerator.recording() as record:
        torch.optim.SGD([weight], lr=0.1).step()  # from here on, torch watches the steps of both classes
        Mine([weight], lr=0.1).step()
    assert [(step.step, step.optimizer, step.devices) for step in record.steps] == [
        (0, "SGD", (None,)), (1, "Mine", (None,)),
    ]  # fmt: skip


def test_a_record_can_be_cleared_and_read() -> None:
    with FakeAccelerator.recording() as record:
        torch.ones(3).to(DEVICE).sum().item()
        text = str(record).splitlines()
        record.clear()
        assert (record.moves, record.syncs, record.steps) == ([], [], [])
    assert text[:2] == ["0 optimizer steps, 1 moves, 2 host syncs", "  1 moves cpu -> fake:0, 12 bytes"]
    assert "  1 syncs by item at " in "\n".join(text)
    assert text[-1].startswith("  fake:0: ")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        record.bytes_alive(1)
