"""The official examples of earlier generations, run by ``make test-legacy``, which sets DRIVETRAIN_LEGACY.

What cannot be fetched is skipped and said at the end; a version that is there and runs no example is a failure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.legacy_examples import stand_ins
from tests.legacy_examples.fetch import VERSIONS, folder_of
from tests.packages import Suite

HERE = Path(__file__).parent
PACKAGES = {package: f"test_{package}" for package in VERSIONS}  # a package, and how the names of its files begin
SUITE = Suite(HERE, "DRIVETRAIN_LEGACY", "make test-legacy", PACKAGES)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The stand-ins for what the examples download, also where the examples of 1.1.0 and 1.3.8 look for it."""
    folder = tmp_path_factory.mktemp("stand_ins")
    stand_ins.make(folder)
    links = [folder_of(package) / "Datasets" for package in VERSIONS]
    for link in links:
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)  # an example was run by hand
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
    yield folder
    for link in links:
        link.unlink()


@pytest.fixture(scope="session")
def offline() -> None:
    """Let programs that are started have no network."""
    paths = [str(HERE / "offline"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the rest of the session


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    SUITE.collection_modifyitems(items)


def pytest_runtest_logreport(report: Any) -> None:
    SUITE.runtest_logreport(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    SUITE.sessionfinish(session)
