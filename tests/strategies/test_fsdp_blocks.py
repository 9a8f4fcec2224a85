"""Which blocks FSDP finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.strategies.fsdp_blocks import apart_from_tied, find_blocks, make_contiguous, matching, names_of, summary


def names(root: nn.Module, blocks: list[nn.Module]) -> list[str]:
    known = names_of(root)
    return [known[block] for block in blocks]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


CASES: dict[str, tuple[Any, list[str]]] = {
    "a list of blocks, of which the parts are not taken": (
        lambda: Model(before=nn.Embedding(9, 4), layers=nn.ModuleList(Block() for _ in range(3)), head=nn.Linear(4, 9)),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "a dictionary of blocks": (
        lambda: Model(layers=nn.ModuleDict({"a": Block(), "b": Block()})), ["layers.a", "layers.b"]
    ),
    "two stacks": (
        lambda: Model(encoder=nn.Sequential(Block(), Block()), decoder=nn.ModuleList([Block(), Block()])),
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"],
    ),
    "the class with most parameters": (
        lambda: Model(net=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))),
        ["net.0", "net.2"],
    ),
    "lists of lists, which cannot be called": (
        lambda: Model(down=nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))),
        ["down.0.0", "down.0.1", "down.1.0", "down.1.1"],
    ),
    "layers that are attributes": (
        lambda: Model(first=nn.Linear(4, 4), second=nn.Linear(4, 4), norm=nn.LayerNorm(4)), ["first", "second"]
    ),
    "whole models beside each other, of which the layers are taken": (
        lambda: Model(student=nn.Sequential(Block(), Block()), teacher=nn.Sequential(Block(), Block())),
        ["student.0", "student.1", "teacher.0", "teacher.1"],
    ),
    "layers without parameters": (lambda: Model(one=nn.Sequential(nn.ReLU(), nn.ReLU()), layer=nn.Linear(4, 1)), []),
    "no repeated layer": (lambda: Model(layer=nn.Linear(4, 1), norm=nn.LayerNorm(4)), []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_repeated_layers_are_blocks(case: str) -> None:
    make, expected = CASES[case]
    root = make()
    assert names(root, find_blocks(root)) == expected


def test_what_a_model_declares_comes_first() -> None:
    """As models of Hugging Face do, also inside of another module."""
    inner = Model(layers=nn.ModuleList([Block(), Block()]), embedding=nn.Embedding(9, 4))
    inner._no_split_modules = ["Embedding", "Block"]  # type: ignore[assignment]
    root = Model(model=inner, other=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert names(root, find_blocks(root)) == ["model.layers.0", "model.layers.1", "model.embedding"]
    inner._no_split_modules = ["Missing"]  # type: ignore[assignment]
    assert names(root, find_blocks(root)) == ["model.layers.0", "model.layers.1", "other.0", "other.1"]


def test_blocks_that_share_parameters_with_others_are_left_out_with_a_warning() -> None:
    root = Model(layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), head=nn.Linear(4, 4))
    root.head.weight = root.layers[0].weight  # type: ignore[index,union-attr]
    with pytest.warns(UserWarning, match=r"stay with the rest of the model: layers.0 \(with head\)"):
        assert names(root, apart_from_tied(root, find_blocks(root))) == ["layers.1"]
    inside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inside[1].weight = inside[0].weight
    root = Model(layers=nn.ModuleList([inside]))
    assert apart_from_tied(root, [inside]) == [inside]  # both are in it


@pytest.mark.parametrize("policy", [3, {3}, object()])
def test_what_is_no_policy_is_an_error(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"auto_wrap_policy got .* Write auto_wrap_policy=\{Block\}"):
        matching(Model(layer=nn.Linear(4, 4)), policy, "auto_wrap_policy")


def test_the_summary_counts_blocks_by_class() -> None:
    root = Model(layers=nn.ModuleList([Block(), Block()]), only=nn.Linear(4, 4))
    assert summary(root, [*root.layers, root.only]) == (  # type: ignore[misc,list-item]
        "2 x Block (layers.0 ... layers.1), 1 x Linear (only), the rest of Model"
    )
    assert summary(root, []) == "all of Model in one"


@pytest.mark.parametrize("unused", ["Embeding", nn.Embedding])
def test_what_a_policy_names_in_vain_is_a_warning(unused: Any) -> None:
    model = Model(layer=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    with pytest.warns(UserWarning, match=r"auto_wrap_policy names Embed\w*, and Model has no such layer\. .*LayerNorm"):
        found = matching(model, {unused, nn.Linear, "LayerNorm"}, "auto_wrap_policy")
    assert names(model, found) == ["layer", "norm"]


def test_classes_whose_subclasses_are_there_are_not_named_in_vain() -> None:
    """Warnings are errors here."""
    model = Model(layer=nn.Linear(4, 4))
    assert matching(model, {nn.Module, "Linear"}, "auto_wrap_policy") == [model, model.layer]


def test_parameters_in_another_memory_format_become_contiguous_and_one_line_names_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model(layer=nn.Linear(4, 3), image=nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last))
    model.layer.weight = nn.Parameter(torch.arange(12.0).view(4, 3).t())
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with caplog.at_level("INFO"):
        make_contiguous(model)
        make_contiguous(model)
    for name, each in model.named_parameters():
        assert each.is_contiguous()
        assert torch.equal(each, before[name])
    [record] = caplog.records
    assert "makes 2 parameters contiguous (layer.weight, image.weight)" in record.message
