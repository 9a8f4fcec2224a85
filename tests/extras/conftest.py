"""Tests of parts that need packages of their own, run by ``make test-extras``, which sets DRIVETRAIN_EXTRAS.

What cannot be installed is skipped and said at the end; a package that is installed and runs no test is a failure.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGES = {  # a package, and how the names of its files begin
    "bitsandbytes": "test_bitsandbytes",
    "deepspeed": "test_deepspeed",
    "torchao": "test_torchao",
}
RAN: Counter[str] = Counter()


def asked() -> bool:
    return bool(os.environ.get("DRIVETRAIN_EXTRAS"))


def missing(package: str) -> str:
    """Why the tests of ``package`` cannot run; "" if they can."""
    if not asked():
        return "run by make test-extras"
    return (
        "" if importlib.util.find_spec(package) else f"{package} is not installed: see the output of make test-extras"
    )


def package_of(path: Path) -> str | None:
    return next((name for name, start in PACKAGES.items() if path.stem.startswith(start)), None)


def pytest_sessionstart() -> None:
    """Remove the locks that killed processes have left: whoever loads a compiled part would wait for them for ever."""
    if asked() and (folder := os.environ.get("TORCH_EXTENSIONS_DIR")):
        for lock in Path(folder).glob("*/lock"):
            lock.unlink()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and (package := package_of(item.path)) and (why := missing(package)):
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" and not report.skipped and (package := package_of(Path(report.nodeid.split("::")[0]))):
        RAN[package] += 1


def verdict(ran: Counter[str], installed: set[str]) -> tuple[list[str], list[str]]:
    """What is to be said of packages that are not installed, and of installed ones that ran no test."""
    skipped = [
        f"SKIPPED: {name} is not installed, so none of its tests ran" for name in sorted(PACKAGES.keys() - installed)
    ]
    idle = [f"FAILED: {name} is installed, and none of its tests ran" for name in sorted(installed) if not ran[name]]
    return skipped, idle


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not asked() or session.config.option.keyword or session.config.option.collectonly:
        return
    skipped, idle = verdict(RAN, {name for name in PACKAGES if importlib.util.find_spec(name)})
    for line in (*skipped, *idle):
        print(f"\n{line}")
    if idle:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
