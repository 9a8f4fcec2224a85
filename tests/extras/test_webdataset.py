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
from tests.extras.resumed import (
    AFTER,
    SAMPLES,
    Counted,
    check_resumes_exactly,
    check_what_needs_the_end_of_an_epoch,
    workers_of,
)
from torch.utils.data import DataLoader, IterableDataset

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)

SHARDS = 8


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


def loader(folder: Path, workers: int, counted: bool, batch_size: int) -> Any:
    data = Shards(folder)
    return DataLoader(Counted(data) if counted else data, batch_size=batch_size, **workers_of(workers))


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


@AFTER
@pytest.mark.parametrize(("ranks", "workers", "counted"), [(2, 0, True), (2, 2, True), (1, 2, False)])
def test_a_fit_resumes_exactly_on_as_many_ranks(
    pool: Any, folder: Path, tmp_path: Path, ranks: int, workers: int, counted: bool, after: int | None
) -> None:
    check_resumes_exactly(pool, ranks, partial(loader, folder, workers, counted), tmp_path / "a.ckpt", after)


def test_what_needs_the_end_of_an_epoch(pool: Any, folder: Path, tmp_path: Path) -> None:
    counted, endless = (partial(loader, folder, 0, each) for each in (True, False))
    check_what_needs_the_end_of_an_epoch(pool, counted, endless, tmp_path)
