from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.compat.batches import (
    convert_tensors_to_scalars,
    convert_to_tensors,
    extract_batch_size,
    has_iterable_dataset,
    has_len,
    has_len_all_ranks,
    move_data_to_device,
    sized_len,
    suggested_max_num_workers,
)
from drivetrain.errors import ConfigurationError


def test_a_tree_is_moved_wherever_the_device_is_named() -> None:
    tree = {"a": torch.ones(1), "b": [torch.ones(2), "text"]}
    assert move_data_to_device(tree, "meta")["b"][0].device.type == "meta"
    assert move_data_to_device(tree, torch.device("meta"))["a"].device.type == "meta"


def test_numbers_and_tensors_go_over_into_each_other() -> None:
    made = convert_to_tensors({"b": True, "i": 1, "f": 2.5, "n": np.ones(2), "s": "text"}, "cpu")
    kinds = {"b": torch.uint8, "i": torch.int32, "f": torch.float32, "n": torch.float64}
    assert {key: made[key].dtype for key in kinds} == kinds
    assert made["s"] == "text"
    assert convert_tensors_to_scalars({"a": torch.tensor([1.5]), "b": [torch.tensor(2), "text"]}) == {
        "a": 1.5,
        "b": [2, "text"],
    }
    with pytest.raises(ValueError, match=r"shape \[2\]"):
        convert_tensors_to_scalars(torch.ones(2))


def test_t9_the_size_of_a_batch_is_that_of_its_first_tensor() -> None:
    assert extract_batch_size({"text": "abc", "a": torch.ones(3, 2)}) == 3
    assert extract_batch_size(torch.tensor(1.0)) == 1
    with pytest.warns(UserWarning, match=r"\[2, 3\]; 3 is used"):
        assert extract_batch_size([torch.ones(3), torch.ones(2)]) == 3
    with pytest.raises(ConfigurationError, match="batch_size="):
        extract_batch_size([1, "a"])


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_questions_about_a_loader() -> None:
    assert (sized_len([1]), sized_len(iter([]))) == (1, None)
    assert has_len(DataLoader([1, 2]))  # type: ignore[arg-type]
    assert not has_len(DataLoader(Endless()))
    assert has_iterable_dataset(DataLoader(Endless()))
    assert not has_iterable_dataset([1])
    with pytest.warns(UserWarning, match="length 0"):
        assert has_len([])


class Ranks:
    """A strategy on one of several ranks, whose loaders have these lengths in all."""

    root_device = torch.device("cpu")

    def __init__(self, total: int) -> None:
        self.total = total

    def reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        assert reduce_op == "sum"
        return tensor.new_tensor(self.total)


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __len__(self) -> int:
        return 2


def test_whether_every_rank_has_a_length() -> None:
    def ask(loader: Any, total: int, *arguments: bool) -> bool:
        return has_len_all_ranks(loader, Ranks(total), *arguments)  # type: ignore[arg-type]

    assert ask([1, 2], 3)
    assert not ask(iter([1]), 3)
    with pytest.warns(UserWarning, match="length 0 on every rank"):
        assert ask([], 0)
    with pytest.raises(RuntimeError, match="this rank, and other ranks have 3 batches"):
        ask([], 3)
    assert ask([], 3, True)
    with pytest.warns(UserWarning, match="IterableDataset with a length"):
        assert ask(DataLoader(Counted()), 2)


def test_workers_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    assert [suggested_max_num_workers(n) for n in (1, 2, 8, 99)] == [7, 3, 1, 1]
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert suggested_max_num_workers(1) == 3
    with pytest.raises(ValueError, match="local_world_size=0"):
        suggested_max_num_workers(0)
