"""torchdata: its states belong to one rank, but over a map-style dataset the Trainer counts the samples itself."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras.resumed import batches, on, samples
from torch.utils.data import Dataset, IterableDataset

from drivetrain.errors import CheckpointError

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)

SAMPLES, GLOBAL_BATCH = 96, 12


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ({"number": number} for number in range(SAMPLES))


def of_map_style(workers: int, batch_size: int) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(Numbers(), batch_size=batch_size, shuffle=True, num_workers=workers)


def of_iterable_style(batch_size: int) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(Stream(), batch_size=batch_size)


def of_nodes(batch_size: int) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    batched = nodes.Batcher(nodes.IterableWrapper([{"number": number} for number in range(SAMPLES)]), batch_size)
    return nodes.Loader(nodes.Mapper(batched, torch.utils.data.default_collate))


@pytest.mark.parametrize("after", [3, None], ids=["inside an epoch", "at its end"])
@pytest.mark.parametrize(("before", "now", "workers"), [(2, 3, 0), (3, 1, 0), (2, 2, 0), (1, 2, 1)])
def test_a_fit_over_a_map_style_dataset_resumes_with_any_number_of_ranks(
    pool: Any, tmp_path: Path, before: int, now: int, workers: int, after: int | None
) -> None:
    make, path = partial(of_map_style, workers), tmp_path / "a.ckpt"
    whole = on(pool, 1, make, GLOBAL_BATCH)
    first = on(pool, before, make, GLOBAL_BATCH, path, after)
    rest = on(pool, now, make, GLOBAL_BATCH, None, None, path)
    print(batches(first, rest)[8:12])
    print(batches(whole)[8:12])
    assert samples(first, rest) == [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]
    assert batches(first, rest) == batches(whole)
    torch.testing.assert_close(rest[0][1], whole[0][1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [of_iterable_style, of_nodes])
def test_other_loaders_resume_on_as_many_ranks(pool: Any, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "a.ckpt"
    whole = on(pool, 2, make, GLOBAL_BATCH)
    first = on(pool, 2, make, GLOBAL_BATCH, path, 3)
    assert batches(first, on(pool, 2, make, GLOBAL_BATCH, None, None, path)) == batches(whole)
    with pytest.raises(CheckpointError, match=r"by 2 processes, and there are 1: its loader has stored its own"):
        on(pool, 1, make, GLOBAL_BATCH, None, None, path)
