"""Which layers a precision may exchange for those of a package, and what stays when it does."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain.precision._layers import exchange, listed, plain_layers


class Own(nn.Linear):
    """A layer with a forward pass of its own."""


def model() -> nn.Module:
    made = nn.ModuleDict({"a": nn.Linear(2, 2), "own": Own(2, 2), "tied": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    made["embedding"] = nn.Embedding(2, 2)
    made["embedding"].weight = made["tied"].weight
    made["block"] = nn.Sequential(nn.Linear(2, 2))
    return made


def test_subclasses_and_layers_with_a_shared_weight_are_left_out() -> None:
    assert plain_layers(model(), nn.Linear).keys() == {"a", "head", "block.0"}


def test_ignored_names_are_those_of_layers_or_of_what_holds_them() -> None:
    assert plain_layers(model(), nn.Linear, {"block", "he"}).keys() == {"a", "head"}


def test_an_exchanged_layer_keeps_hooks_and_mode() -> None:
    made, calls = model().eval(), []
    made["a"].register_forward_hook(lambda *_: calls.append("forward"))
    made["a"].register_forward_pre_hook(lambda *_: calls.append("before"))
    made["a"].register_full_backward_hook(lambda *_: calls.append("backward"))
    new = nn.Linear(2, 2)
    assert exchange(made, {"a": new}) is made
    assert made["a"] is new
    assert not new.training
    new(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == ["before", "forward", "backward"]


def test_a_module_that_is_such_a_layer_is_exchanged_itself() -> None:
    layer, new = nn.Linear(2, 2), nn.Linear(2, 2)
    assert plain_layers(layer, nn.Linear) == {"": layer}
    assert exchange(layer, {"": new}) is new


def test_long_lists_are_cut() -> None:
    assert listed({"b", "a"}) == "a, b"
    assert listed(["1", "2", "3", "4", "5", "6"]) == "1, 2, 3, 4 and 2 more"
