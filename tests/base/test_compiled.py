"""What torch.compile wraps is compiled in place, and its names in state dicts are those without the wrapper."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.base.compiled import compiled_in_place, compiled_method, context_of, original, own_names, plain_names


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recording:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) * 2


def test_a_wrapped_module_is_compiled_in_place_with_what_was_given() -> None:
    net, backend, x = Net(), Recording(), torch.ones(1, 2)
    expected = net(x)
    wrapped: Any = torch.compile(net, backend=backend, dynamic=False)
    assert compiled_in_place(wrapped) is original(wrapped) is net
    assert context_of(net) is wrapped.dynamo_ctx
    assert backend.graphs == []
    assert torch.equal(net(x), expected)
    assert len(backend.graphs) == 1
    assert torch.equal(wrapped(x), expected)
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"]


def test_a_module_of_torchs_own_is_compiled_too() -> None:
    """``module.compile()`` of torch 2.13 compiles nothing of it."""
    net, backend = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), Recording()
    compiled_in_place(torch.compile(net, backend=backend))(torch.ones(1, 2))
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("thing", [Net(), None, 3, "net"])
def test_anything_else_is_left_as_it_is(thing: Any) -> None:
    assert compiled_in_place(thing) is original(thing) is thing
    if isinstance(thing, nn.Module):
        assert context_of(thing) is None


def test_a_method_is_compiled_if_the_module_is() -> None:
    net, backend, x = Net(), Recording(), torch.ones(1, 2)
    assert compiled_method(net, "twice") == net.twice
    compiled_in_place(torch.compile(net, backend=backend))
    assert torch.equal(compiled_method(net, "twice")(x), net.layer(x).relu() * 2)
    assert len(backend.graphs) == 1  # one graph for the method and the call in it


def test_with_fullgraph_methods_stay_as_they_are() -> None:
    net = Net()
    compiled_in_place(torch.compile(net, backend="eager", fullgraph=True))
    assert compiled_method(net, "twice") == net.twice


def test_a_copy_is_not_compiled() -> None:
    net = Net()
    compiled_in_place(torch.compile(net, backend="eager"))
    assert context_of(copy.deepcopy(net)) is None


# ---- names -----------------------------------------------------------------------------------------------------------


def nested(compiles: bool) -> nn.Module:
    """With batch norm, whose version torch keeps beside the state; both a part and a part of that are compiled."""
    wrap: Any = (lambda module: torch.compile(module, backend="eager")) if compiles else (lambda module: module)
    torch.manual_seed(1)
    inner = nn.Sequential(wrap(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    return nn.ModuleDict({"net": wrap(inner), "head": nn.Linear(2, 1)})


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("loads", [True, False])
def test_a_state_fits_with_and_without_compiled_submodules(saves: bool, loads: bool) -> None:
    source, target = nested(saves), nested(loads)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 1
    state = plain_names(source.state_dict())
    assert list(state) == list(nested(False).state_dict())
    target.load_state_dict(own_names(target, state))
    for one, other in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_names_of_wrappers_in_a_file_are_understood() -> None:
    source, target = nested(True), nested(False)
    target.load_state_dict(own_names(target, source.state_dict()))
    with pytest.raises(RuntimeError, match="_orig_mod"):  # the control: torch itself does not understand them
        target.load_state_dict(source.state_dict())


def test_torchs_metadata_is_renamed_too() -> None:
    state: Any = plain_names(nested(True).state_dict())
    assert state._metadata["net.1"] == {"version": 2}
    renamed: Any = own_names(nested(True), state)
    assert renamed._metadata["net._orig_mod.1"] == {"version": 2}


def test_where_nothing_is_compiled_nothing_is_copied() -> None:
    net = nested(False)
    state = net.state_dict()
    assert plain_names(state) is state
    assert own_names(net, state) is state


def test_a_wrapper_itself_takes_a_plain_state() -> None:
    wrapped: Any = torch.compile(Net(), backend="eager")
    state = Net().state_dict()
    wrapped.load_state_dict(own_names(wrapped, state))
    assert torch.equal(original(wrapped).layer.weight, state["layer.weight"])
