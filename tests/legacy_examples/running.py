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
    root = folder_of(package)
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "DRIVETRAIN_STAND_INS": str(data),
        "TORCH_HOME": str(data / "torch"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["--generation", GENERATION[row.version], root / "pl_examples" / row.path, *row.options]
    done = programs.run("-m", "drivetrain.compat", *command, cwd=folder, env=environment, merged=True)
    trained = re.search(r"^Epoch (\d+)/\1: (\d+)/\2 batches", done.stdout, re.MULTILINE)
    tested = re.search(r"^Test: (\d+)/\1 batches", done.stdout, re.MULTILINE)
    print(done.stdout)
    if (absent := re.search(r"No module named '(torchvision|gym)'", done.stdout)) is not None:
        pytest.skip(f"{absent[1]} is not installed: see the output of make test-legacy")
    if done.returncode == 0 and row.result.startswith("does nothing"):
        return "" if trained or tested else row.does
    if done.returncode == 0:
        return " and ".join([word for word, found in (("trains", trained), ("tests", tested)) if found])
    last = done.stdout.rpartition("Traceback")[2]
    stopped = any(message in last for message in row.messages)
    return row.does if stopped and not tested else done.stdout[-1000:]


def programs_in(package: str) -> set[str]:
    """Return the examples of a version that are programs, not modules for others; none as for :func:`rows_of`."""
    folder = folder_of(package) / "pl_examples"
    files = folder.rglob("*.py") if GENERATION[VERSIONS[package]] in table.GENERATIONS else []
    return {path.relative_to(folder).as_posix() for path in files if "__main__" in path.read_text("utf-8")}
