"""litData: the state of a StreamingDataset counts the samples of all ranks, so a fit resumes on any number of them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.extras.resumed import EVERY, GLOBAL_BATCH, SAMPLES, batches, on, samples

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)


def loader(folder: Path, workers: int, batch_size: int) -> Any:
    litdata = pytest.importorskip("litdata")
    data = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False)
    start: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return litdata.StreamingDataLoader(data, batch_size=batch_size, **start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = pytest.importorskip("litdata.streaming.writer")
    folder = tmp_path_factory.mktemp("chunks")
    cache = writer.BinaryWriter(str(folder), chunk_size=8)
    for number in range(SAMPLES):
        cache[number] = {"number": number}
    cache.done()
    cache.merge()
    return folder


@pytest.mark.parametrize("after", [3, None], ids=["inside an epoch", "at its end"])
@pytest.mark.parametrize(("before", "now", "workers"), [(2, 3, 0), (3, 1, 0), (2, 2, 0), (1, 2, 1)])
def test_a_fit_resumes_with_any_number_of_ranks(
    pool: Any, folder: Path, tmp_path: Path, before: int, now: int, workers: int, after: int | None
) -> None:
    """Its order depends on the number of ranks that began the epoch."""
    make, path = partial(loader, folder, workers), tmp_path / "a.ckpt"
    first = on(pool, before, make, GLOBAL_BATCH, path, after)
    rest = on(pool, now, make, GLOBAL_BATCH, None, None, path)
    assert samples(first, rest) == EVERY
    if before == now:
        assert batches(first, rest) == batches(on(pool, now, make, GLOBAL_BATCH))


def test_a_position_inside_a_global_batch_repeats_its_samples(pool: Any, folder: Path, tmp_path: Path) -> None:
    make, path = partial(loader, folder, 0), tmp_path / "a.ckpt"
    first = on(pool, 2, make, GLOBAL_BATCH, path, 3)
    rest = on(pool, 4, make, 8, None, None, path)
    found = samples(first, rest)
    assert sorted(set(found)) == EVERY
    assert len(found) - len(EVERY) == 3 * GLOBAL_BATCH % 8
