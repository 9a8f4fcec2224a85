"""Full precision: nothing is converted, nothing is scaled; clipping touches one optimizer only (trap T22)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.module.hooks import overrides
from drivetrain.precision import Precision


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_it_leaves_everything_alone() -> None:
    plugin, module = Precision(), nn.Linear(2, 1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert plugin.name == "32-true"
    assert plugin.convert_module(module) is module
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert plugin.forward_context() is None
    for context in (plugin.module_init_context(), plugin.tensor_init_context()):
        assert context is not None
        with context:
            assert torch.ones(1).dtype is torch.float32
    batch = [torch.ones(1, dtype=torch.float64)]
    assert plugin.convert_input(batch) is batch
    assert plugin.scaler is None
    assert plugin.state_dict() == {}
    plugin.load_state_dict({})


def test_the_core_need_not_convert_a_batch() -> None:
    assert not overrides(Precision(), "convert_input", Precision)


def test_nothing_is_scaled_and_a_step_is_a_step() -> None:
    plugin, parameter = Precision(), with_gradient(2.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plugin.bind([optimizer])
    loss = torch.ones(())
    assert plugin.scales_loss is False
    assert plugin.scale(loss) is loss
    plugin.unscale(optimizer)
    assert plugin.step(optimizer) is True
    assert parameter.tolist() == [-2.0]


def test_step_passes_its_arguments_on() -> None:
    optimizer = torch.optim.SGD([with_gradient(2.0)], lr=1.0)
    calls: list[int] = []
    assert Precision().step(optimizer, closure=lambda: calls.append(1)) is True
    assert calls == [1]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_parameters_without_gradients_are_clipped_to_nothing(algorithm: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    Precision().clip_gradients(torch.optim.SGD([parameter], lr=0.1), 1.0, algorithm)
    assert parameter.grad is None


def test_t22_what_scales_the_loss_is_unscaled_before_clipping() -> None:
    class Scaling(Precision):
        scales_loss = True

        def unscale(self, optimizer: torch.optim.Optimizer) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad /= 8

    parameter = with_gradient(24.0, 32.0)
    Scaling().clip_gradients(torch.optim.SGD([parameter], lr=1.0), 6.0)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0, 4.0]  # their norm is 5, below 6


@pytest.mark.parametrize(
    ("algorithm", "clip_val", "expected"),
    [
        ("norm", 1.0, ([0.6], [0.8])),
        ("norm", 5.0, ([3.0], [4.0])),
        ("norm", 99.0, ([3.0], [4.0])),
        ("value", 3.5, ([3.0], [3.5])),
        ("value", 0.5, ([0.5], [0.5])),
        ("norm", 0.0, ([3.0], [4.0])),
        ("value", 0.0, ([3.0], [4.0])),
        ("norm", -1.0, ([3.0], [4.0])),
    ],
)
def test_t22_clip_over_all_groups_of_this_optimizer(
    algorithm: Any, clip_val: float, expected: tuple[list[float], list[float]]
) -> None:
    first, second, other = with_gradient(3.0), with_gradient(4.0), with_gradient(12.0)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second, nn.Parameter(torch.zeros(1))]}], lr=0.1)
    Precision().clip_gradients(optimizer, clip_val, algorithm)
    torch.testing.assert_close(first.grad, torch.tensor(expected[0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(second.grad, torch.tensor(expected[1]), rtol=1e-5, atol=0)
    assert other.grad is not None
    assert other.grad.item() == 12.0


def test_norm_is_the_default() -> None:
    parameter = with_gradient(3.0, 4.0)
    Precision().clip_gradients(torch.optim.SGD([parameter], lr=0.1), 1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_backward_passes_its_arguments_on() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = (x * 3).sum()
    Precision().backward(loss, retain_graph=True)
    Precision().backward(loss)
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]
    y = torch.tensor([1.0, 2.0], requires_grad=True)
    Precision().backward(y * 1, torch.tensor([1.0, 10.0]))
    assert y.grad is not None
    assert y.grad.tolist() == [1.0, 10.0]
