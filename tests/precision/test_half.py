"""Everything in 16 bits: parameters, buffers, inputs, and what is made inside the contexts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from drivetrain.errors import ConfigurationError
from drivetrain.module.hooks import overrides
from drivetrain.plugins.precision import HalfPrecision as FamiliarPath
from drivetrain.precision import HalfPrecision, Precision

NAMES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class Net(nn.Module):
    """A layer, statistics, a counter and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)
        self.register_buffer("phase", torch.tensor([1 + 2j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.norm(self.layer(x)))
        return y


def test_the_familiar_import_path() -> None:
    assert FamiliarPath is HalfPrecision


@pytest.mark.parametrize(("name", "dtype"), NAMES.items())
def test_floats_of_the_module_are_converted_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    module, plugin = Net(), HalfPrecision(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    parameters = list(module.parameters())
    assert plugin.name == name
    assert not plugin.scales_loss
    assert plugin.convert_module(module) is module
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    for key, value in module.state_dict().items():
        if before[key].is_floating_point():
            assert value.dtype is dtype, key
            assert torch.equal(value, before[key].to(dtype)), key
        else:  # num_batches_tracked and the complex buffer
            assert value.dtype is before[key].dtype, key
            assert torch.equal(value, before[key]), key


@pytest.mark.parametrize(("name", "dtype"), NAMES.items())
def test_inputs_are_converted_and_integers_never(name: str, dtype: torch.dtype) -> None:
    plugin = HalfPrecision(name)
    assert overrides(plugin, "convert_input", Precision)
    count, mask = torch.tensor([70_001]), torch.tensor([True])
    batch: dict[str, Any] = {
        "x": [torch.ones(2), (torch.ones(2, dtype=torch.float64), "text")],
        "count": count, "mask": mask, "z": torch.tensor([1 + 2j]), "n": 3, "f": 0.5, "none": None,
    }  # fmt: skip
    converted = plugin.convert_input(batch)
    assert converted["x"][0].dtype is dtype
    assert converted["x"][1][0].dtype is dtype
    assert converted["x"][1][1] == "text"
    assert converted["count"] is count
    assert converted["mask"] is mask
    assert converted["z"].dtype is torch.complex64
    assert (converted["n"], converted["f"], converted["none"]) == (3, 0.5, None)
    assert batch["x"][0].dtype is torch.float32  # the loader's own batch is as it was


def test_packed_sequences_are_converted_with_their_order() -> None:
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    converted = HalfPrecision("bf16-true").convert_input([packed])[0]
    assert isinstance(converted, PackedSequence)
    assert converted.data.dtype is torch.bfloat16
    assert packed.sorted_indices is not None
    assert converted.sorted_indices is not None
    assert torch.equal(converted.sorted_indices, packed.sorted_indices)
    tokens = pack_sequence([torch.tensor([70_001])])
    assert HalfPrecision("bf16-true").convert_input(tokens).data.tolist() == [70_001]


@pytest.mark.parametrize(("name", "dtype"), NAMES.items())
def test_new_tensors_in_the_contexts_have_the_dtype(name: str, dtype: torch.dtype) -> None:
    plugin, before = HalfPrecision(name), torch.get_default_dtype()
    for context in (plugin.forward_context(), plugin.module_init_context()):
        assert context is not None
        for _ in range(2):  # reusable
            with context:
                assert torch.ones(1).dtype is dtype
                assert nn.Linear(1, 1).weight.dtype is dtype
                with context:  # and may be entered within itself
                    assert torch.ones(1).dtype is dtype
                assert torch.ones(1).dtype is dtype
            assert torch.get_default_dtype() is before


def test_an_exception_restores_the_default_dtype() -> None:
    context, before = HalfPrecision().forward_context(), torch.get_default_dtype()
    assert context is not None
    with pytest.raises(ZeroDivisionError), context, context:
        _ = 1 / 0
    assert torch.get_default_dtype() is before


@pytest.mark.parametrize(("name", "dtype"), NAMES.items())
def test_training_is_bit_equal_to_a_loop_in_that_dtype(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 8, 4), torch.randn(5, 8, 1)
    ours, theirs = Net(), Net()
    theirs.load_state_dict(ours.state_dict())

    theirs.layer.to(dtype), theirs.norm.to(dtype), theirs.out.to(dtype)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    for batch, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        F.mse_loss(theirs(batch.to(dtype)), target.to(dtype)).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()

    plugin = HalfPrecision(name)
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
        plugin.clip_gradients(optimizer, 0.5)
        optimizer.step()

    assert all(p.dtype is dtype for p in ours.parameters())
    for key, value in theirs.state_dict().items():
        assert value.isfinite().all(), key
        assert torch.equal(ours.state_dict()[key], value), key


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bf16-tru", r"HalfPrecision\('bf16-tru'\).* Did you mean 'bf16-true'\? Known: 16-true, bf16-true\."),
        ("16-mixed", r"HalfPrecision\('16-mixed'\).* Known: 16-true, bf16-true\."),
        (16, r"HalfPrecision\(16\).* Known: 16-true, bf16-true\."),
    ],
)
def test_an_unknown_name(name: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HalfPrecision(name)
