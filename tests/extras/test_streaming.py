"""MosaicML Streaming: its state counts the samples of all ranks, so a fit resumes on any number of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.extras.resumed import EVERY, GLOBAL_BATCH, SAMPLES, batches, on, samples

if not os.environ.get("DRIVETRAIN_EXTRAS"):
    pytest.skip("needs packages of its own: run make test-extras", allow_module_level=True)


def streaming() -> Any:
    """The package, without its parts for texts and pictures, which need transformers and torchvision."""
    for part in ("streaming.multimodal", "streaming.text", "streaming.vision"):
        sys.modules.setdefault(part, ModuleType(part))
    for place, kind in (("feature_extraction_utils", "BatchFeature"), ("tokenization_utils_base", "BatchEncoding")):
        module = ModuleType(f"transformers.{place}")
        setattr(module, kind, type(kind, (dict,), {}))
        sys.modules.setdefault(f"transformers.{place}", module)
    package = pytest.importorskip("streaming")
    return package


def loader(folder: Path, workers: int, batch_size: int) -> Any:
    package = streaming()
    data = package.StreamingDataset(local=str(folder), shuffle=True, batch_size=batch_size, num_canonical_nodes=1)
    # workers that are forked have the package as it is here
    start: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return package.StreamingDataLoader(data, batch_size=batch_size, **start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mds")
    with streaming().MDSWriter(out=str(folder), columns={"number": "int"}) as writer:
        for number in range(SAMPLES):
            writer.write({"number": number})
    yield folder
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # of ranks that have ended


@pytest.mark.parametrize("after", [3, None], ids=["inside an epoch", "at its end"])
@pytest.mark.parametrize(("before", "now", "workers"), [(2, 3, 0), (3, 1, 0), (2, 2, 0), (1, 2, 1)])
def test_a_fit_resumes_with_any_number_of_ranks(
    pool: Any, folder: Path, tmp_path: Path, before: int, now: int, workers: int, after: int | None
) -> None:
    make, path = partial(loader, folder, workers), tmp_path / "a.ckpt"
    whole = on(pool, 1, make, GLOBAL_BATCH)
    first = on(pool, before, make, GLOBAL_BATCH, path, after)
    rest = on(pool, now, make, GLOBAL_BATCH, None, None, path)
    assert batches(first, rest) == batches(whole)
    assert samples(whole) == EVERY
    torch.testing.assert_close(rest[0][1], whole[0][1], rtol=1e-12, atol=1e-12)


def test_each_sample_comes_once_with_another_global_batch(pool: Any, folder: Path, tmp_path: Path) -> None:
    make, path = partial(loader, folder, 0), tmp_path / "a.ckpt"
    first = on(pool, 2, make, GLOBAL_BATCH, path, 3)
    rest = on(pool, 4, make, 8, None, None, path)
    assert samples(first, rest) == EVERY
