"""Everything in 64 bits; complex numbers as they are, as under Module.double()."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.plugins.precision import DoublePrecision as FamiliarPath
from drivetrain.precision import DoublePrecision


class Net(nn.Module):
    """Real and complex parameters, statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("phase", torch.tensor([1 + 2j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.layer(x)) * self.filter * self.phase).abs().sum(1)


def test_the_familiar_import_path() -> None:
    assert FamiliarPath is DoublePrecision


def test_floats_are_converted_and_complex_numbers_and_integers_never() -> None:
    module, plugin = Net(), DoublePrecision()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert plugin.name == "64-true"
    assert plugin.convert_module(module) is module
    assert {key: value.dtype for key, value in module.state_dict().items()} == {
        "layer.weight": torch.float64, "layer.bias": torch.float64,
        "norm.weight": torch.float64, "norm.bias": torch.float64,
        "norm.running_mean": torch.float64, "norm.running_var": torch.float64,
        "norm.num_batches_tracked": torch.int64,
        "filter": torch.complex64, "phase": torch.complex64,
    }  # fmt: skip
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key].to(value.dtype)), key  # the imaginary parts too
    assert {key: value.dtype for key, value in Net().double().state_dict().items()} == {
        key: value.dtype for key, value in module.state_dict().items()
    }


def test_inputs() -> None:
    count = torch.tensor([2**53 + 1])
    batch: dict[str, Any] = {
        "x": (torch.ones(2), torch.ones(2, dtype=torch.float16)),
        "z": torch.tensor([1 + 2j]),
        "count": count,
    }
    converted = DoublePrecision().convert_input(batch)
    assert [t.dtype for t in converted["x"]] == [torch.float64, torch.float64]
    assert converted["z"] is batch["z"]
    assert converted["count"] is count


def test_contexts() -> None:
    plugin, before = DoublePrecision(), torch.get_default_dtype()
    for context in (plugin.forward_context(), plugin.module_init_context()):
        assert context is not None
        with context, context:
            assert torch.ones(1).dtype is torch.float64
            assert torch.tensor([1j]).dtype is torch.complex128
        assert torch.get_default_dtype() is before


def test_training_is_bit_equal_to_a_loop_in_64_bits() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 8, 4), torch.randn(5, 8)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())

    theirs.double()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    for batch, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        F.mse_loss(theirs(batch.double()), target.double()).backward()
        optimizer.step()

    plugin = DoublePrecision()
    plugin.convert_module(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    context = plugin.forward_context()
    assert context is not None
    for pair in zip(x, y, strict=True):
        batch, target = plugin.convert_input(pair)
        optimizer.zero_grad()
        with context:
            loss = F.mse_loss(ours(batch), target)
        plugin.backward(loss)
        optimizer.step()

    assert loss.dtype is torch.float64
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key
