"""Tests of parts that need packages of their own, run by ``make test-extras``, which sets DRIVETRAIN_EXTRAS.

What cannot be installed is skipped and said at the end; a package that is installed and runs no test is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.packages import Suite

PACKAGES = {  # a package, and how the names of its files begin
    "aiohttp": "test_http",
    "bitsandbytes": "test_bitsandbytes",
    "botocore": "test_aws",
    "comet_ml": "test_comet",
    "datasets": "test_hf_datasets",
    "deepspeed": "test_deepspeed",
    "gymnasium": "test_reinforce",
    "kubeflow_trainer_api": "test_kubeflow",
    "kubernetes": "test_k8s",
    "mlflow": "test_mlflow",
    "neptune": "test_neptune",
    "optuna": "test_optuna",
    "litdata": "test_litdata",
    "peft": "test_lora",
    "s3fs": "test_s3",
    "streaming": "test_streaming",
    "torchdata": "test_torchdata",
    "torchao": "test_torchao",
    "trackio": "test_trackio",
    "wandb": "test_wandb",
    "webdataset": "test_webdataset",
}
SUITE = Suite(Path(__file__).parent, "DRIVETRAIN_EXTRAS", "make test-extras", PACKAGES)


def pytest_sessionstart() -> None:
    """Remove the locks that killed processes have left: whoever loads a compiled part would wait for them for ever."""
    if SUITE.asked() and (folder := os.environ.get("TORCH_EXTENSIONS_DIR")):
        for lock in Path(folder).glob("*/lock"):
            lock.unlink()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    SUITE.collection_modifyitems(items)


def pytest_runtest_logreport(report: Any) -> None:
    SUITE.runtest_logreport(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    SUITE.sessionfinish(session)


@pytest.fixture(scope="module")
def check_parity(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], None]]:
    """Run a cell of the parity matrix of precisions with a package: from the start, from a file and from a folder."""
    import torch
    from tests import parity_matrix as parity
    from tests import parity_packages as packages

    written = tmp_path_factory.mktemp("written")

    def check(name: str, precision: str) -> None:
        single, sharded = written / f"{precision}-{name == 'single_device'}.ckpt", written / precision
        if not single.exists():
            packages.write_file(name, precision, single)
        if not sharded.exists():
            pool.run(packages.write_sharded, precision, sharded, world_size=parity.SHARDED.processes, group=False)
        sources = {"from a file": single, "from a folder": sharded}
        folder, processes = tmp_path_factory.mktemp("cell"), parity.ROWS[name].processes
        given = name, precision, folder, sources
        if processes == 1:
            ranks = [packages.run_cell(*given)]
        else:
            ranks = pool.run(packages.run_cell, *given, world_size=processes, group=False)
        packages.check_cell(precision, folder, ranks)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other, with so small a model
    yield check
    torch.set_num_threads(threads)
