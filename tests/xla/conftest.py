"""Tests on torch_xla's devices on the processor, run by ``make test-xla``, which sets DRIVETRAIN_XLA.

What cannot be installed is skipped and said at the end; a package that is installed and runs no test is a failure. The
tests in spmd/ need a process of their own: what ``use_spmd`` does to a process cannot be undone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.packages import Suite, below

SUITE = Suite(Path(__file__).parent, "DRIVETRAIN_XLA", "make test-xla", {"torch_xla": "test_"})
SPMD = Path(__file__).parent / "spmd"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    SUITE.collection_modifyitems(items)
    several = int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1
    for item in items:
        if below(SUITE.folder, item) and below(SPMD, item) is not several:
            why = "the other of the two commands of make test-xla runs it"
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True, scope="session")
def _runtime() -> None:
    """Start torch_xla's runtime before any test's first backward pass: torch counts devices then, and only then."""
    import torch_xla

    if int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1:
        torch_xla.runtime.use_spmd()
    torch_xla.device()


def pytest_runtest_logreport(report: Any) -> None:
    SUITE.runtest_logreport(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    SUITE.sessionfinish(session)
    if SUITE.asked() and session.config.option.keyword and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # of the two commands of make test-xla, the other has what -k asks for
