"""Run one of the official examples through ``drivetrain exec``, and find out what came of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.legacy_examples.fetch import VERSIONS, folder_of
from tests.legacy_examples.table import GENERATION, Row, rows

from drivetrain.compat import table


def rows_of(package: str) -> list[Row]:
    """Return the rows of the version that is in ``package``; none if its generation does not exist yet."""
    version = VERSIONS[package]
    return rows(version) if GENERATION[version] in table.GENERATIONS else []


def examples(package: str) -> pytest.MarkDecorator:
    """Parametrize a test by the rows of the version that is in ``package``."""
    found = rows_of(package)
    return pytest.mark.parametrize("row", found, ids=[row.path for row in found])


def listed(package: str) -> set[str]:
    """Return the examples that the table lists for the version that is in ``package``."""
    return {row.path for row in rows_of(package)}


def result_of(row: Row, package: str, data: Path, programs: Any, folder: Path) -> str:
    """Run an example in ``folder``; return what the table's last column should say.

    Args:
        row: the example.
        package: where its version is.
        data: the stand-ins.
        programs: runs it in a copy of a process that has imported torch.
        folder: its working directory.
    """
    for each in data.iterdir():
        (folder / each.name).symlink_to(each)
    environment = {"DRIVETRAIN_STAND_INS": str(data), "TORCH_HOME": str(data / "torch")}
    command = ["--generation", GENERATION[row.version], folder_of(package) / "pl_examples" / row.path, *row.options]
    done = run(programs, folder, package, "-m", "drivetrain.compat", *command, **environment)
    if (absent := re.search(r"No module named '(torchvision|gym)'", done.stdout)) is not None:
        pytest.skip(f"{absent[1]} is not installed: see the output of make test-legacy")
    what = what_was_done(done.stdout)
    if done.returncode == 0 and row.result.startswith("does nothing"):
        return what or row.does
    if done.returncode == 0:
        return what
    last = done.stdout.rpartition("Traceback")[2]
    stopped = any(message in last for message in row.messages)
    return row.does if stopped and "tests" not in what else done.stdout[-1000:]


def run(programs: Any, folder: Path, package: str, *command: str | Path, **environment: str) -> Any:
    """Run a Python program that can import ``pl_examples``; its output is printed, for the report of a failure."""
    paths = [str(folder_of(package)), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment}
    done = programs.run(*command, cwd=folder, env=environ, merged=True)
    print(done.stdout)
    return done


def what_was_done(output: str) -> str:
    """Return "trains", "trains and tests", or "", by the progress that a program has printed."""
    trained = re.search(r"^\S+ \S+ Epoch (\d+)/\1: (\d+)/\2 batches", output, re.MULTILINE)
    tested = re.search(r"^\S+ \S+ Test: (\d+)/\1 batches", output, re.MULTILINE)
    return " and ".join(word for word, found in (("trains", trained), ("tests", tested)) if found)


def programs_in(package: str) -> set[str]:
    """Return the examples of a version that are programs, not modules for others; none as for :func:`rows_of`."""
    folder = folder_of(package) / "pl_examples"
    files = folder.rglob("*.py") if GENERATION[VERSIONS[package]] in table.GENERATIONS else []
    return {path.relative_to(folder).as_posix() for path in files if "__main__" in path.read_text("utf-8")}
