"""HF datasets in streaming: a DataLoader reads the epoch again up to the position, a StatefulDataLoader does not."""

from __future__ import annotations

import json
import os
import warnings
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
from torch.utils.data import DataLoader

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)

FILES = 8


def stream(folder: Path, shuffled: bool) -> Any:
    """What this rank reads."""
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    files, cache = sorted(map(str, folder.glob("*.jsonl"))), str(folder / "cache")
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)
    data = data.shuffle(seed=7, buffer_size=20) if shuffled else data
    data = split_dataset_by_node(data, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    return data.with_format("torch")


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


@AFTER
@pytest.mark.parametrize(
    ("make", "ranks", "workers", "counted"),
    [(plain, 2, 0, True), (plain, 2, 2, True), (plain, 1, 2, False), (stateful, 2, 0, True), (stateful, 2, 2, True)],
)
def test_a_fit_resumes_exactly_on_as_many_ranks(
    pool: Any, folder: Path, tmp_path: Path, make: Any, ranks: int, workers: int, counted: bool, after: int | None
) -> None:
    this = partial(make, folder, workers, counted)
    check_resumes_exactly(pool, ranks, this, tmp_path / "a.ckpt", after, is_shuffled=make is plain)


def test_what_needs_the_end_of_an_epoch(pool: Any, folder: Path, tmp_path: Path) -> None:
    counted, endless = (partial(plain, folder, 0, each) for each in (True, False))
    check_what_needs_the_end_of_an_epoch(pool, counted, endless, tmp_path)
