"""A loop of one's own on the Engine: nothing is added, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine
from drivetrain.accelerators import Accelerator
from drivetrain.precision import MixedPrecision, Precision
from drivetrain.strategies import SingleDeviceStrategy


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def make_loader(data: TensorDataset) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(data, batch_size=8, shuffle=True)


def bare_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[Tensor]:
    losses = []
    for _ in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
    return losses


def engine_loop(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> list[Tensor]:
    model, optimizer = engine.setup(model, optimizer)
    losses = []
    for _ in range(3):
        for batch in loader:
            x, y = engine.to_device(batch)
            with engine.autocast():
                loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            engine.backward(loss)
            engine.clip_gradients(optimizer, 0.5)
            optimizer.step()
            losses.append(loss.detach())
    engine.teardown()
    return losses


def test_a_loop_on_the_engine_is_the_bare_loop_bit_for_bit(data: TensorDataset) -> None:
    bare, ours = net(), net()
    expected = bare_loop(bare, torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9), make_loader(data))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    losses = engine_loop(Engine(accelerator="cpu"), ours, optimizer, make_loader(data))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), bare.parameters(), strict=True))
    assert len({float(loss) for loss in losses}) == len(losses)  # it did train


def test_bf16_mixed_is_autocast_and_keeps_parameters_in_32_bits(data: TensorDataset) -> None:
    engine = Engine(accelerator="cpu", precision="bf16-mixed")
    model = engine.setup(net())
    x, _ = data[:8]
    assert not torch.is_autocast_enabled("cpu")
    with engine.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        out = model(x)
    assert not torch.is_autocast_enabled("cpu")
    assert out.dtype is torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_32_true_needs_no_context() -> None:
    engine = Engine(accelerator="cpu")
    assert engine.forward_context() is None
    with engine.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_the_context_can_be_entered_again_and_again() -> None:
    context = Engine(accelerator="cpu", precision="bf16-mixed").forward_context()
    assert context is not None
    for _ in range(3):
        with context:
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("algorithm", "clip_val", "expected"),
    [
        ("norm", 1.0, [0.6, 0.8]),
        ("norm", 10.0, [3.0, 4.0]),
        ("value", 3.5, [3.0, 3.5]),
        ("norm", 0.0, [3.0, 4.0]),
    ],
)
def test_clip_gradients(algorithm: Any, clip_val: float, expected: list[float]) -> None:
    engine = Engine(accelerator="cpu")
    parameter, unused, other = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    parameter.grad, other.grad = torch.tensor([3.0, 4.0]), torch.tensor([30.0, 40.0])
    optimizer = torch.optim.SGD([{"params": [parameter]}, {"params": [unused]}], lr=0.1)
    engine.clip_gradients(optimizer, clip_val, algorithm)
    torch.testing.assert_close(parameter.grad, torch.tensor(expected))
    assert other.grad.tolist() == [30.0, 40.0]  # not this optimizer's
    assert unused.grad is None


class MetaAccelerator(Accelerator):
    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("meta") for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"accelerator": MetaAccelerator()},
        {"strategy": SingleDeviceStrategy(accelerator=MetaAccelerator())},
    ],
    ids=["accelerator", "both"],
)
def test_everything_goes_to_the_root_device(arguments: dict[str, Any]) -> None:
    engine = Engine(**arguments)
    assert engine.device == torch.device("meta")
    batch = {"x": [torch.ones(2)], "name": "text"}
    moved = engine.to_device(batch)
    assert moved["x"][0].device == engine.device
    assert moved["name"] == "text"
    model = net()
    assert engine.setup(model) is model
    assert {p.device for p in model.parameters()} == {engine.device}


def test_to_device_hands_back_what_is_there_already() -> None:
    batch = [torch.ones(2), torch.ones(1)]
    assert Engine(accelerator="cpu").to_device(batch) is batch


class Recording(Precision):
    name = "recording"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.calls.append("convert")
        return module.double()

    def forward_context(self, device_type: str) -> AbstractContextManager[Any] | None:
        self.calls.append(f"context {device_type}")
        return None

    def clip_gradients(self, optimizer: Any, clip_val: float, algorithm: Any = "norm") -> None:
        self.calls.append(f"clip {clip_val} {algorithm}")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"backward {sorted(kwargs)}")
        super().backward(loss, *args, **kwargs)


@pytest.mark.parametrize("strategy", ["auto", "instance"])
def test_a_precision_of_ones_own_does_the_work(strategy: str) -> None:
    plugin = Recording()
    own = SingleDeviceStrategy() if strategy == "instance" else "auto"
    engine = Engine(accelerator="cpu", strategy=own, plugins=[plugin])
    assert engine.precision is plugin
    model = engine.setup(nn.Linear(2, 1))
    assert model.weight.dtype is torch.float64
    with engine.autocast():
        loss = model(torch.ones(1, 2, dtype=torch.float64)).sum()
    engine.backward(loss, retain_graph=True)
    engine.clip_gradients(torch.optim.SGD(model.parameters(), lr=0.1), 2.0, "value")
    assert plugin.calls == ["convert", "context cpu", "backward ['retain_graph']", "clip 2.0 value"]
    assert model.weight.grad is not None


def test_a_plan_is_taken_as_it_is() -> None:
    plan = Engine(accelerator="cpu", precision="bf16-mixed").plan
    engine = Engine(plan=plan, precision="32-true")
    assert engine.plan is plan
    assert isinstance(engine.precision, MixedPrecision)


def test_setup_returns_what_it_was_given() -> None:
    model = net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    engine = Engine(accelerator="cpu")
    assert engine.setup(model) is model
    assert engine.setup(model, first) == (model, first)
    assert engine.setup(model, first, second) == (model, first, second)
    assert engine.strategy.optimizers == [first, second]
    assert [id(p) for p in first.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
