"""HF datasets in streaming: a DataLoader reads the epoch again up to the position, a StatefulDataLoader does not."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras.resumed import batches, on, samples
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.errors import CheckpointError

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)

SAMPLES, FILES, GLOBAL_BATCH = 96, 8, 12
EVERY = [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]
"""Each sample of each epoch once."""


class Counted(IterableDataset[Any]):
    """A stream with the number of this rank's samples, without which several ranks have to fetch ahead."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.set_epoch, self.state_dict, self.load_state_dict = data.set_epoch, data.state_dict, data.load_state_dict

    def __len__(self) -> int:
        return SAMPLES // int(os.environ.get("WORLD_SIZE", 1))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def stream(folder: Path, shuffled: bool) -> Any:
    """What this rank reads."""
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    files, cache = sorted(map(str, folder.glob("*.jsonl"))), str(folder / "cache")
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)
    data = data.shuffle(seed=7, buffer_size=20) if shuffled else data
    data = split_dataset_by_node(data, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    return data.with_format("torch")


def workers_of(number: int) -> dict[str, Any]:
    return {"num_workers": number, "multiprocessing_context": "fork"} if number else {}


def plain(folder: Path, workers: int, counted: bool, batch_size: int) -> Any:
    data = stream(folder, shuffled=True)
    return DataLoader(Counted(data) if counted else data, batch_size=batch_size, **workers_of(workers))


def stateful(folder: Path, workers: int, counted: bool, batch_size: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():  # of torch, about what torchdata calls
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        data = Counted(stream(folder, shuffled=False))
        return module.StatefulDataLoader(data, batch_size=batch_size, **workers_of(workers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, each = tmp_path_factory.mktemp("lines"), SAMPLES // FILES
    for file in range(FILES):
        lines = [json.dumps({"number": number}) for number in range(file * each, (file + 1) * each)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("after", [3, None], ids=["inside an epoch", "at its end"])
@pytest.mark.parametrize(
    ("make", "ranks", "workers", "counted"),
    [(plain, 2, 0, True), (plain, 2, 2, True), (plain, 1, 2, False), (stateful, 2, 0, True), (stateful, 2, 2, True)],
)
def test_a_fit_resumes_exactly_on_as_many_ranks(
    pool: Any, folder: Path, tmp_path: Path, make: Any, ranks: int, workers: int, counted: bool, after: int | None
) -> None:
    this, path = partial(make, folder, workers, counted), tmp_path / "a.ckpt"
    whole = on(pool, ranks, this, GLOBAL_BATCH)
    first = on(pool, ranks, this, GLOBAL_BATCH, path, after)
    rest = on(pool, ranks, this, GLOBAL_BATCH, None, None, path)
    assert batches(first, rest) == batches(whole)
    assert samples(whole) == EVERY
    orders = {str([numbers for each, numbers in batches(whole) if each == epoch]) for epoch in range(3)}
    assert len(orders) == 3 or make is stateful  # shuffled in another way in each epoch
    torch.testing.assert_close(rest[0][1], whole[0][1], rtol=1e-12, atol=1e-12)


def test_what_needs_the_end_of_an_epoch(pool: Any, folder: Path, tmp_path: Path) -> None:
    counted, endless = (partial(plain, folder, 0, each) for each in (True, False))
    inside, end = tmp_path / "inside.ckpt", tmp_path / "end.ckpt"
    on(pool, 2, counted, GLOBAL_BATCH, inside, 3)
    with pytest.raises(CheckpointError, match="by 2 processes, and there are 1: its position in the data counts"):
        on(pool, 1, counted, GLOBAL_BATCH, None, None, inside)
    on(pool, 2, endless, GLOBAL_BATCH, inside, 3)
    with pytest.raises(CheckpointError, match="one of several processes whose loader has no length"):
        on(pool, 2, endless, GLOBAL_BATCH, None, None, inside)
    first = on(pool, 2, endless, GLOBAL_BATCH, end, None)
    assert samples(first, on(pool, 1, endless, GLOBAL_BATCH, None, None, end)) == EVERY
