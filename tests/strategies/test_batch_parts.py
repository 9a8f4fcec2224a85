"""A batch is split over devices without loss, and what its parts give becomes what the batch would have given."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from drivetrain import WeightedLoss
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.batch_parts import Joiner, split_batch

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


def split(batch: Any, devices: int = 2) -> tuple[list[Any], list[int]]:
    return split_batch(batch, [CPU] * devices)


def test_a_nested_batch_is_split_at_every_tensor() -> None:
    x = torch.arange(5)
    batch = {"pair": Pair(x, [x, (x * 2,)]), "sample": Sample(x, "one"), "scale": torch.tensor(3.0), "epoch": 7}
    (first, second), sizes = split(batch)
    assert sizes == [3, 2]
    assert (type(first["pair"]), type(first["sample"])) == (Pair, Sample)
    assert [part["pair"].y[1][0].tolist() for part in (first, second)] == [[0, 2, 4], [6, 8]]
    assert [part["sample"].x.tolist() for part in (first, second)] == [[0, 1, 2], [3, 4]]
    assert [(part["scale"].item(), part["epoch"], part["sample"].name) for part in (first, second)] == [
        (3.0, 7, "one"), (3.0, 7, "one"),
    ]  # fmt: skip


def test_strings_and_numbers_of_samples_are_split_with_them() -> None:
    (first, second), _ = split([torch.arange(3), ("a", "b", "c"), [1, 2, 3], ["all", "samples"]])
    assert first[1:] == [("a", "b"), [1, 2], ["all", "samples"]]
    assert second[1:] == [("c",), [3], ["all", "samples"]]


@pytest.mark.parametrize(("samples", "expected"), [(7, [2, 2, 2, 1]), (8, [2] * 4), (3, [1, 1, 1]), (1, [1]), (0, [0])])
def test_parts_are_as_even_as_possible(samples: int, expected: list[int]) -> None:
    parts, sizes = split(torch.arange(samples), devices=4)
    assert sizes == expected == [len(part) for part in parts]
    assert torch.cat(parts).tolist() == list(range(samples))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), r"A batch of 4 samples .* tensor of shape \(3,\).*override split_batch"),
        ([torch.zeros(4), pack_sequence([torch.zeros(2)])], "a PackedSequence, which cannot be split"),
        ({"n": 3}, "has no tensor with dimensions.*override split_batch"),
    ],
)
def test_what_cannot_be_split_is_an_error(batch: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        split(batch)


JOINER = Joiner([3, 1], CPU)


def test_means_are_weighted_by_samples() -> None:
    joined = JOINER.joined([{"loss": torch.tensor(1.0), "n": 2.0}, {"loss": torch.tensor(5.0), "n": 6.0}])
    assert joined == {"loss": torch.tensor(2.0), "n": 3.0}


def test_outputs_of_samples_come_behind_each_other_in_their_order() -> None:
    one = (torch.tensor([1.0, 2.0, 3.0]), ["a", "b", "c"], torch.zeros(3, 2))
    other = (torch.tensor([4.0]), ["d"], torch.ones(1, 2))
    scores, names, logits = JOINER.joined([one, other])
    assert (scores.tolist(), names, logits.shape) == ([1, 2, 3, 4], ["a", "b", "c", "d"], (4, 2))


def test_a_list_of_whole_outputs_keeps_its_length() -> None:
    joined = Joiner([2, 2], CPU).joined([[torch.zeros(2), torch.ones(2)]] * 2)
    assert [each.tolist() for each in joined] == [[0, 0, 0, 0], [1, 1, 1, 1]]


def test_weighted_losses_are_weighted_by_their_weights() -> None:
    found = JOINER.joined([WeightedLoss(torch.tensor(2.0), 1), WeightedLoss(torch.tensor(6.0), 3)])
    assert found == WeightedLoss(torch.tensor(5.0), 4)
    counted = [WeightedLoss(torch.tensor(2.0), torch.tensor(1)), WeightedLoss(torch.tensor(6.0), torch.tensor(3))]
    assert JOINER.joined(counted) == (torch.tensor(5.0), torch.tensor(4))


def test_a_part_without_tokens_counts_for_nothing() -> None:
    nan = torch.tensor(float("nan"))
    assert JOINER.joined([WeightedLoss(nan, 0), WeightedLoss(torch.tensor(6.0), 3)]) == (torch.tensor(6.0), 3)
    assert JOINER.joined([None, torch.tensor(6.0)]) == torch.tensor(6.0)
    assert JOINER.joined([None, None]) is None


def test_other_outputs_are_kept() -> None:
    assert JOINER.joined([{"a": "same", "b": "one", "c": 4}, {"a": "same", "b": "two", "c": 4}]) == {
        "a": "same", "b": ["one", "two"], "c": 4,
    }  # fmt: skip
    outputs = OrderedDict(x=torch.zeros(3)), OrderedDict(x=torch.ones(1))
    assert type(JOINER.joined(outputs)) is OrderedDict


def test_a_hook_gets_one_number_of_each_part() -> None:
    gathered = JOINER.gathered([
        {"loss": torch.tensor(1.0), "logits": torch.zeros(3, 2), "n": 3, "name": "a", "nothing": None},
        {"loss": torch.tensor(5.0), "logits": torch.ones(1, 2), "n": 1, "name": "b", "nothing": None},
    ])  # fmt: skip
    assert gathered["loss"].tolist() == [1.0, 5.0]
    assert gathered["n"].tolist() == [3, 1]
    assert gathered["logits"].shape == (4, 2)
    assert (gathered["name"], gathered["nothing"]) == (["a", "b"], None)
    assert Joiner([4], CPU).gathered([torch.tensor(1.0)]).tolist() == [1.0]


def test_gradients_pass_through_both() -> None:
    for join in (JOINER.joined, lambda outputs: JOINER.gathered(outputs).sum()):
        losses = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]
        join(losses).backward()
        assert all(loss.grad is not None for loss in losses)


def test_a_pair_of_numbers_is_no_list_of_two_samples() -> None:
    joiner = Joiner([2, 2], CPU)
    for kind in (list, tuple):
        outputs = [kind([torch.tensor(1.0), torch.tensor(2.0)]), kind([torch.tensor(3.0), torch.tensor(4.0)])]
        assert joiner.joined(outputs) == kind([torch.tensor(2.0), torch.tensor(3.0)])
