"""Programs of the tests run in processes of their own: what they import must not be left in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain import compat

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def served() -> Iterator[None]:
    """The original's modules may be imported in this process."""
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run Python with these arguments, in the test's folder and without what this process's environment has of ours."""

    def run(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("DRIVETRAIN_COMPAT", "PYTHONPATH")}
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={**kept, **environ},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def answer(python: Run) -> Callable[..., str]:
    """The same, for a run that must succeed and say nothing on stderr: what it printed."""

    def run(*arguments: str | Path, **environ: str) -> str:
        done = python(*arguments, **environ)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    return run
