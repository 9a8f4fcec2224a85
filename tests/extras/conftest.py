"""Tests of parts that need packages of their own, run by ``make test-extras``, which sets DRIVETRAIN_EXTRAS.

What cannot be installed is skipped and said at the end; a package that is installed and runs no test is a failure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.packages import Suite

PACKAGES = {  # a package, and how the names of its files begin
    "bitsandbytes": "test_bitsandbytes",
    "deepspeed": "test_deepspeed",
    "torchao": "test_torchao",
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
