"""DeepSpeed's cells of the parity matrix: docs/parity.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import parity_matrix as parity

from drivetrain.errors import ConfigurationError


@pytest.fixture(scope="module")
def processes(pool: Any) -> Iterator[Any]:
    """Processes of their own: DeepSpeed leaves traces in each."""
    with pool.fresh() as fresh:
        yield fresh


@pytest.fixture(scope="module")
def sources(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Path]]:
    """The checkpoints that a cell resumes from, written by other strategies on other numbers of processes."""
    folder = tmp_path_factory.mktemp("written")

    def written(name: str, precision: str) -> dict[str, Path]:
        single, sharded = folder / f"{precision}.ckpt", folder / precision
        if not single.exists():
            parity.write_file(name, precision, single)
            pool.run(parity.write_sharded, precision, sharded, world_size=parity.SHARDED.processes, group=False)
        return {"from a file": single, "from a folder": sharded}

    return written


def run_cell(*given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's own
        return parity.run_cell(*given)


@pytest.mark.parametrize(("name", "precision"), parity.cells("test-extras"))
def test_a_cell_ends_where_the_reference_does(
    processes: Any, tmp_path: Path, sources: Any, name: str, precision: str
) -> None:
    given = name, precision, tmp_path, sources(name, precision)
    parity.check_cell(precision, tmp_path, processes.run(run_cell, *given, group=False))


def refusal(name: str, precision: str, path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigurationError) as caught:
            parity.train(parity.ROWS[name], precision, path)
    return str(caught.value)


REFUSED = [cell for cell in parity.cells("refused") if cell[0].startswith("deepspeed")]


@pytest.mark.parametrize(("name", "precision"), REFUSED)
def test_a_refused_cell_is_an_error_that_says_what_to_write(
    processes: Any, tmp_path: Path, name: str, precision: str
) -> None:
    for message in processes.run(refusal, name, precision, tmp_path / "x", group=False):
        assert f"cannot train with precision={precision!r}" in message
        assert "Write " in message
