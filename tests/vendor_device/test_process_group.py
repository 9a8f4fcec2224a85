"""Two processes, each on a lab device of its own, with collectives by labccl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = Path(__file__).parent / "ranks.py"


@pytest.fixture(scope="module")
def found(vendor: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, after both have ended well."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [vendor.start([RANKS, rank, folder]) for rank in range(2)]
    try:
        ends = [vendor.end_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()  # one that still waits for the other
    assert [code for code, _ in ends] == [0, 0], "\n".join(said for _, said in ends)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


EVERY_RANK: dict[str, Any] = {
    "names": ["labccl", "labccl", "LabCCL", "labccl"],
    "all_reduce": {"SUM": [3, 15], "AVG": [1.5, 7.5], "MIN": [1, 5], "MAX": [2, 10], "PRODUCT": [2, 50]},
    "all_reduce_other_types": [[3, 15]] * 4,
    "all_reduce_part_of_a_tensor": None,  # differs by rank, below
    "host_tensors": [3, 15],
    "work": [True, True, True],
    "broadcast": [2, 10],
    "all_gather": [[1, 5], [2, 10]],
    "all_gather_into_tensor": [1, 5, 2, 10],
    "send_and_receive": [1, 5],
    "objects": [[{"rank": 0}, {"rank": 1}], [1]],
    "barrier": True,
}
BY_RANK: dict[str, tuple[Any, Any]] = {
    "all_reduce_part_of_a_tensor": ([[0, 1], [0, 3], [0, 1]], [[0, 2], [0, 3], [0, 2]]),
    "reduce_scatter": ([3], [15]),
    "reduce_scatter_tensor": ([1.5], [7.5]),
    "all_to_all": ([[1, 2], [1, 2]], [[5, 10], [5, 10]]),
    "reduce_gather_scatter": ([[3, 15], [[1, 5], [2, 10]], [1, 5]], [None, None, [2, 6]]),
    "functional": ([[3, 15], [1, 5, 2, 10], [3]], [[3, 15], [1, 5, 2, 10], [15]]),
    "subgroups": ([[3, 15], [1, 5]], [[3, 15], [2, 10]]),
}


@pytest.mark.parametrize("collective", [*(name for name in EVERY_RANK if name not in BY_RANK), *BY_RANK])
def test_collectives(found: list[dict[str, Any]], collective: str) -> None:
    expected = BY_RANK.get(collective) or (EVERY_RANK[collective],) * 2
    assert [plain(rank[collective]) for rank in found] == list(expected)


def test_a_wrong_call_is_an_error_and_not_a_hang(found: list[dict[str, Any]]) -> None:
    assert all(rank["different_shapes"] != "nothing was said" for rank in found)


@pytest.mark.parametrize("kind", ["ddp", "ddp_device_ids", "fully_sharded"])
def test_training_on_two_devices_is_training_on_whole_batches(found: list[dict[str, Any]], kind: str) -> None:
    alone = found[0]["whole_batches"]
    first, second = (rank[kind][0] if kind == "ddp" else rank[kind] for rank in found)
    assert len(first) == len(second) == len(alone) > 0
    for one, other, whole in zip(first, second, alone, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-6)


def test_collectives_are_not_counted_as_waits(found: list[dict[str, Any]]) -> None:
    assert [rank["ddp"][1] for rank in found] == [0, 0]
