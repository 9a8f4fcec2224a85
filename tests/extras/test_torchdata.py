"""torchdata: its states belong to one rank, but over a map-style dataset the Trainer counts the samples itself."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras.resumed import GLOBAL_BATCH, SAMPLES, batches, on, samples
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from drivetrain.errors import CheckpointError
from drivetrain.testing import check_part

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index}


def own_part() -> range:
    """The numbers of this rank."""
    return range(int(os.environ.get("RANK", 0)), SAMPLES, int(os.environ.get("WORLD_SIZE", 1)))


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return len(own_part())

    def __iter__(self) -> Any:
        worker = get_worker_info()
        part = own_part() if worker is None else own_part()[worker.id :: worker.num_workers]
        return ({"number": number} for number in part)


def stateful(data: Any, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():  # of torch, about what torchdata calls
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return module.StatefulDataLoader(data, **options)


def of_map_style(workers: int, batch_size: int) -> Any:
    start: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return stateful(Numbers(), batch_size=batch_size, shuffle=True, **start)


def of_iterable_style(batch_size: int, workers: int = 0) -> Any:
    start: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return stateful(Stream(), batch_size=batch_size, **start)


def of_nodes(batch_size: int) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    batched = nodes.Batcher(nodes.IterableWrapper([{"number": number} for number in own_part()]), batch_size)
    return nodes.Loader(nodes.Mapper(batched, torch.utils.data.default_collate))


@pytest.mark.parametrize("after", [3, None], ids=["inside an epoch", "at its end"])
@pytest.mark.parametrize(
    ("before", "now", "workers"), [(2, 3, 0), (3, 1, 0), (2, 2, 0), (1, 2, 0), (2, 3, 1), (3, 1, 1)]
)
def test_a_fit_over_a_map_style_dataset_resumes_with_any_number_of_ranks(
    pool: Any, tmp_path: Path, before: int, now: int, workers: int, after: int | None
) -> None:
    """On other ranks, the order of later epochs is another one; and with workers, that of one process is."""
    make, path = partial(of_map_style, workers), tmp_path / "a.ckpt"
    whole = on(pool, 1 + workers, make, GLOBAL_BATCH)
    first = on(pool, before, make, GLOBAL_BATCH, path, after)
    rest = on(pool, now, make, GLOBAL_BATCH, None, None, path)
    assert samples(first, rest) == [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]
    same = None if before == now else 16
    assert batches(first, rest)[:same] == batches(whole)[:same]


def test_one_process_with_workers_hands_over_at_the_end_of_an_epoch(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    on(pool, 1, partial(of_map_style, 1), GLOBAL_BATCH, path, 3)
    with pytest.raises(CheckpointError, match="the order of its loader with workers is that of one process"):
        on(pool, 2, partial(of_map_style, 1), GLOBAL_BATCH, None, None, path)


@pytest.mark.parametrize("make", [of_iterable_style, of_nodes])
def test_other_loaders_resume_on_as_many_ranks(pool: Any, tmp_path: Path, make: Any) -> None:
    path = tmp_path / "a.ckpt"
    first = on(pool, 1, make, GLOBAL_BATCH, path, 3)
    assert batches(first, on(pool, 1, make, GLOBAL_BATCH, None, None, path)) == batches(on(pool, 1, make, GLOBAL_BATCH))
    with pytest.raises(CheckpointError, match=r"by 1 processes, and there are 2: its loader has stored its own"):
        on(pool, 2, make, GLOBAL_BATCH, None, None, path)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_resume_over_an_iterable_style_dataset_with_a_length(pool: Any, tmp_path: Path, workers: int) -> None:
    make, path = partial(of_iterable_style, workers=workers), tmp_path / "a.ckpt"
    first = on(pool, 2, make, GLOBAL_BATCH, path, 3)
    whole = on(pool, 2, make, GLOBAL_BATCH)
    assert batches(first, on(pool, 2, make, GLOBAL_BATCH, None, None, path)) == batches(whole)
    assert samples(whole) == [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]


def test_two_ranks_over_nodes_which_have_no_length_need_the_end_of_an_epoch(pool: Any, tmp_path: Path) -> None:
    inside, end = tmp_path / "inside.ckpt", tmp_path / "end.ckpt"
    on(pool, 2, of_nodes, GLOBAL_BATCH, inside, 3)
    with pytest.raises(CheckpointError, match="one of several processes whose loader has no length"):
        on(pool, 2, of_nodes, GLOBAL_BATCH, None, None, inside)
    first = on(pool, 2, of_nodes, GLOBAL_BATCH, end, None)
    assert batches(first, on(pool, 2, of_nodes, GLOBAL_BATCH, None, None, end)) == batches(
        on(pool, 2, of_nodes, GLOBAL_BATCH)
    )


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_it_passes_the_checks_for_loaders(arguments: dict[str, Any]) -> None:
    outcomes = check_part("loader", "torchdata.stateful_dataloader:StatefulDataLoader", arguments)
    assert {each.result for each in outcomes} == {"ok"}
