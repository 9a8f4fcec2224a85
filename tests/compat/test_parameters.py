from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.compat.parameters import find_shared_parameters, grad_norm, measure_flops, set_shared_parameters


def test_the_norms_of_gradients() -> None:
    layer = nn.Linear(2, 2)
    assert grad_norm(layer, 2) == {}
    layer(torch.ones(1, 2)).sum().backward()
    norms = grad_norm(layer, 2)
    assert list(norms) == ["grad_2.0_norm/weight", "grad_2.0_norm/bias", "grad_2.0_norm_total"]
    assert [float(norm) for norm in norms.values()] == pytest.approx([2, 2**0.5, 6**0.5])
    assert float(grad_norm(layer, "inf", "-")["grad_inf_norm-bias"]) == 1
    with pytest.raises(ValueError, match="norm_type=-1"):
        grad_norm(layer, -1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Sequential(nn.Linear(2, 2, bias=False))
        self.b[0].weight = self.a.weight
        self.c = nn.Linear(3, 3)


def test_shared_parameters_are_found_and_tied_again() -> None:
    module = Tied()
    shared = find_shared_parameters(module)
    assert shared == [["a.weight", "b.0.weight"]]
    module.b[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert find_shared_parameters(module) == []
    assert set_shared_parameters(module, shared) is module
    assert module.b[0].weight is module.a.weight


def test_operations_are_counted_and_gradients_kept() -> None:
    layer, batch = nn.Linear(2, 4), torch.ones(3, 2)
    layer(batch).sum().backward()
    assert layer.weight.grad is not None
    before = layer.weight.grad.clone()
    forward = measure_flops(layer, lambda: layer(batch))
    assert forward == 2 * 3 * 2 * 4
    assert measure_flops(layer, lambda: layer(batch), torch.sum) == 2 * forward  # the input needs no gradient
    assert torch.equal(layer.weight.grad, before)
