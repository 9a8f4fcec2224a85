"""Suites that need packages of their own: what cannot be installed is skipped and said, what is there must be tested.

A conftest.py makes one :class:`Suite` and lets its hooks call the methods of the same name.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def below(folder: Path, item: pytest.Item) -> bool:
    """Whether a test's file lies below the folder; quicker than to ask the path, for many thousands of tests."""
    return str(item.path).startswith(f"{folder}{os.sep}")


class Suite:
    """The tests of one folder.

    Args:
        folder: where they are.
        variable: the environment variable by which the target of the Makefile asks for them.
        target: what users write to run them.
        packages: the packages, each with how the names of its test files begin.
    """

    def __init__(self, folder: Path, variable: str, target: str, packages: Mapping[str, str]) -> None:
        self.folder, self.variable, self.target, self.packages = folder, variable, target, packages
        self.ran: Counter[str] = Counter()

    def asked(self) -> bool:
        return bool(os.environ.get(self.variable))

    def missing(self, package: str) -> str:
        """Why the tests of ``package`` cannot run; "" if they can."""
        if not self.asked():
            return f"run by {self.target}"
        found = importlib.util.find_spec(package)
        return "" if found else f"{package} is not installed: see the output of {self.target}"

    def package_of(self, path: Path) -> str | None:
        return next((name for name, start in self.packages.items() if path.stem.startswith(start)), None)

    def collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            package = self.package_of(item.path) if below(self.folder, item) else None
            if package is not None and (why := self.missing(package)):
                item.add_marker(pytest.mark.skip(reason=why))

    def runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and not report.skipped:
            package = self.package_of(Path(report.nodeid.split("::")[0]))
            if package:
                self.ran[package] += 1

    def verdict(self, ran: Counter[str], installed: set[str]) -> tuple[list[str], list[str]]:
        """What is to be said of packages that are not installed, and of installed ones that ran no test."""
        missing = sorted(self.packages.keys() - installed)
        skipped = [f"SKIPPED: {name} is not installed, so none of its tests ran" for name in missing]
        idle = [
            f"FAILED: {name} is installed, and none of its tests ran" for name in sorted(installed) if not ran[name]
        ]
        return skipped, idle

    def sessionfinish(self, session: pytest.Session) -> None:
        if not self.asked() or session.config.option.keyword or session.config.option.collectonly:
            return
        skipped, idle = self.verdict(self.ran, {name for name in self.packages if importlib.util.find_spec(name)})
        for line in (*skipped, *idle):
            print(f"\n{line}")
        if idle:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
