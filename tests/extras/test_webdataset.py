"""webdataset: its pipelines have no state, so a fit that resumes reads the epoch again up to its position."""

from __future__ import annotations

import io
import os
import tarfile
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

SAMPLES, SHARDS, GLOBAL_BATCH = 96, 8, 12
EVERY = [(epoch, number) for epoch in range(3) for number in range(SAMPLES)]
"""Each sample of each epoch once."""


class Shards(IterableDataset[Any]):
    """The samples of tar files, of which each rank and worker reads some, in another order in each epoch."""

    def __init__(self, folder: Path) -> None:
        self.urls, self.epoch = sorted(map(str, folder.glob("*.tar"))), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        wds = pytest.importorskip("webdataset")
        warnings.filterwarnings("ignore", r"unclosed file.*\.tar", ResourceWarning)  # webdataset leaves them open
        data = wds.WebDataset(
            self.urls, nodesplitter=wds.split_by_node, shardshuffle=100, detshuffle=True, seed=self.epoch
        )
        data = data.compose(wds.detshuffle(20, seed=self.epoch)).decode()
        return iter(data.map(lambda sample: {"number": int(sample["number.txt"])}))


class Counted(Shards):
    """With the number of this rank's samples, without which several ranks have to fetch ahead."""

    def __len__(self) -> int:
        return SAMPLES // int(os.environ.get("WORLD_SIZE", 1))


def loader(folder: Path, workers: int, counted: bool, batch_size: int) -> Any:
    start: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader((Counted if counted else Shards)(folder), batch_size=batch_size, **start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, each = tmp_path_factory.mktemp("shards"), SAMPLES // SHARDS
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard * each, (shard + 1) * each):
                text = str(number).encode()
                entry = tarfile.TarInfo(f"{number:04}.number.txt")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
    return folder


@pytest.mark.parametrize("after", [3, None], ids=["inside an epoch", "at its end"])
@pytest.mark.parametrize(("ranks", "workers", "counted"), [(2, 0, True), (2, 2, True), (1, 2, False)])
def test_a_fit_resumes_exactly_on_as_many_ranks(
    pool: Any, folder: Path, tmp_path: Path, ranks: int, workers: int, counted: bool, after: int | None
) -> None:
    make, path = partial(loader, folder, workers, counted), tmp_path / "a.ckpt"
    whole = on(pool, ranks, make, GLOBAL_BATCH)
    first = on(pool, ranks, make, GLOBAL_BATCH, path, after)
    rest = on(pool, ranks, make, GLOBAL_BATCH, None, None, path)
    assert batches(first, rest) == batches(whole)
    assert samples(whole) == EVERY
    orders = {str([numbers for each, numbers in batches(whole) if each == epoch]) for epoch in range(3)}
    assert len(orders) == 3  # shuffled in another way in each epoch
    torch.testing.assert_close(rest[0][1], whole[0][1], rtol=1e-12, atol=1e-12)


def test_what_needs_the_end_of_an_epoch(pool: Any, folder: Path, tmp_path: Path) -> None:
    counted, endless = (partial(loader, folder, 0, each) for each in (True, False))
    inside, end = tmp_path / "inside.ckpt", tmp_path / "end.ckpt"
    on(pool, 2, counted, GLOBAL_BATCH, inside, 3)
    with pytest.raises(CheckpointError, match="by 2 processes, and there are 1: its position in the data counts"):
        on(pool, 1, counted, GLOBAL_BATCH, None, None, inside)
    on(pool, 2, endless, GLOBAL_BATCH, inside, 3)
    with pytest.raises(CheckpointError, match="one of several processes whose loader has no length"):
        on(pool, 2, endless, GLOBAL_BATCH, None, None, inside)
    first = on(pool, 2, endless, GLOBAL_BATCH, end, None)
    assert samples(first, on(pool, 1, endless, GLOBAL_BATCH, None, None, end)) == EVERY
