"""Gradients are sent in one order, whatever the order in which they come, and are means when backward ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import NotSupportedError
from drivetrain.strategies import gradient_exchange
from drivetrain.strategies.gradient_exchange import GradientExchange, GradientExchanges


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, other_first: bool = False) -> Tensor:
        layers = (self.other, self.one) if other_first else (self.one, self.other)
        return layers[1](layers[0](x)).sum()  # type: ignore[no-any-return]


class Network:
    """Adds to each tensor what the other rank sends: ``factor`` times the same gradients, and its flags."""

    def __init__(self, factor: float = 3.0, others_have: float = 0.5) -> None:
        self.factor, self.others_have = factor, others_have
        self.sent: list[tuple[str, bool]] = []
        self.waited: list[str] = []
        self.in_backward = False

    def start(self, tensor: Tensor, name: str) -> Any:
        self.sent.append((name, self.in_backward))
        return tensor, name

    def wait(self, handle: Any) -> None:
        tensor, name = handle
        self.waited.append(name)
        flags = tensor[-self.parameters_of(name) :].clone()
        tensor.mul_(1 + self.factor)
        tensor[-self.parameters_of(name) :] = flags + self.others_have

    def parameters_of(self, name: str) -> int:
        return self.counts[name]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_exchange, "_BUCKET_BYTES", 40)  # a layer each: weight and bias


def exchanging(module: nn.Module, network: Network) -> GradientExchange:
    exchange = GradientExchange(module.parameters(), 2, network.start, network.wait)
    network.counts = {bucket.name: len(bucket.parameters) for bucket in exchange._buckets}  # type: ignore[attr-defined]
    return exchange


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("other_first", [False, True])
def test_gradients_are_means_when_backward_has_ended_and_travel_in_one_order(other_first: bool) -> None:
    plain, module, network = Two(), Two(), Network(others_have=0.0)
    exchanging(module, network)
    x = torch.ones(2, 3)
    plain(x, other_first).backward()
    module(x, other_first).backward()
    names = [f"drivetrain.gradients.{index}" for index in range(len(network.sent))]
    assert [name for name, _ in network.sent] == network.waited == names
    assert len(names) >= 3
    for (name, found), expected in zip(gradients(module).items(), gradients(plain).values(), strict=True):
        if name.startswith("unused"):
            assert found is expected is None  # no rank has one
        else:
            torch.testing.assert_close(found, expected * 2)  # the mean of 1 and 3 of them


def test_a_gradient_that_another_rank_has_is_there_on_all() -> None:
    module, network = Two(), Network(others_have=0.5)
    exchanging(module, network)
    module(torch.ones(2, 3)).backward()
    assert all(gradient is not None for gradient in gradients(module).values())


def test_nothing_is_sent_while_a_window_is_open_and_then_its_sum() -> None:
    plain, module, network = Two(), Two(), Network(others_have=0.0)
    exchange = exchanging(module, network)
    exchange.enabled = False
    module(torch.ones(2, 3)).backward()
    assert network.sent == []
    exchange.enabled = True
    module(torch.ones(2, 3)).backward()
    for _ in range(2):
        plain(torch.ones(2, 3)).backward()
    torch.testing.assert_close(module.one.weight.grad, plain.one.weight.grad * 2)  # type: ignore[operator]


def test_after_close_gradients_are_left_alone() -> None:
    module, network = Two(), Network()
    exchange = exchanging(module, network)
    exchange.close()
    module(torch.ones(2, 3)).backward()
    assert network.sent == []


def test_a_sparse_gradient_is_refused() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Embedding(3, 2, sparse=True)

    module, network = Sparse(), Network()
    exchanging(module, network)
    with pytest.raises(NotSupportedError, match=r"shape \(3, 2\) has a sparse gradient.*sparse=False"):
        module.layer(torch.tensor([0])).sum().backward()


def test_a_strategy_has_one_exchange_for_each_module() -> None:
    """Paused for one module only, also where pauses are nested; a second beginning replaces the first."""
    exchanges, networks = GradientExchanges(), [Network(others_have=0.0), Network(others_have=0.0)]
    one, other = Two(), Two()
    for module, network in ((one, networks[0]), (other, networks[1]), (one, networks[0])):
        exchanges.begin(module, 2, network.start, network.wait)
        network.counts = dict.fromkeys((f"drivetrain.gradients.{index}" for index in range(3)), 2)  # type: ignore[attr-defined]
    with exchanges.paused(one), exchanges.paused(Two()):
        with exchanges.paused(one):
            pass
        for module in (one, other):
            module(torch.ones(2, 3)).backward()
    assert [len(network.sent) for network in networks] == [0, 3]
    one(torch.ones(2, 3)).backward()
    assert [len(network.sent) for network in networks] == [3, 3]
    exchanges.close()
    one(torch.ones(2, 3)).backward()
    assert len(networks[0].sent) == 3


def test_thawed_parameters_are_exchanged_when_training_continues() -> None:
    exchanges, network, module = GradientExchanges(), Network(others_have=0.0), Two()
    network.counts = dict.fromkeys((f"drivetrain.gradients.{index}" for index in range(3)), 2)  # type: ignore[attr-defined]
    module.one.requires_grad_(False)
    exchanges.begin(module, 2, network.start, network.wait)
    exchanges.include_thawed(None)
    module(torch.ones(2, 3)).backward()
    module.one.requires_grad_(True)
    module(torch.ones(2, 3)).backward()
    assert len(network.sent) == 2 + 2
    for _ in range(2):  # once it has begun again
        exchanges.include_thawed(module)
        module(torch.ones(2, 3)).backward()
    assert len(network.sent) == 2 + 2 + 3 + 3
