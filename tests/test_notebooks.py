"""The notebooks of the examples run in a real kernel from the first cell to the last, and are saved without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"
pytestmark = pytest.mark.timeout(300)


def executed(name: str, folder: Path) -> list[Any]:
    """The cells of a notebook after a kernel has executed it in an empty folder; an error in a cell is raised here."""
    document = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(
        document, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    cells: list[Any] = document.cells
    return cells


def shown(cells: list[Any], kind: str) -> list[str]:
    """All displayed outputs of a MIME type."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def printed(cells: list[Any]) -> str:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_valid_and_is_saved_without_outputs(path: Path) -> None:
    document = nbformat.read(path, as_version=4)
    nbformat.validate(document)
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert path.stat().st_size < 20_000


def test_the_first_steps_train_draw_and_predict(tmp_path: Path) -> None:
    cells = executed("first_steps.ipynb", tmp_path)
    assert "max_epochs=6 is reached" in printed(cells)
    accuracy = printed(cells).split("never seen: ")[1].split()[0]
    assert float(accuracy) > 0.9
    assert len(shown(cells, "image/png")) == 3  # digits, curves, mistakes


def test_a_run_that_was_stopped_ends_as_one_that_was_not_and_has_a_report(tmp_path: Path) -> None:
    cells = executed("resume_and_report.ipynb", tmp_path)
    lines = printed(cells).splitlines()
    assert [line for line in lines if line.endswith((" True", " False"))] == [
        "net.0.weight True", "net.0.bias True", "net.3.weight True", "net.3.bias True", "losses True",
    ]  # fmt: skip
    page = (tmp_path / "runs" / "resumed" / "version_0" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert any("report.html" in html for html in shown(cells, "text/html"))


def test_a_cell_that_fails_is_found(tmp_path: Path) -> None:
    """The control."""
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    with pytest.raises(Exception, match="AssertionError"):
        NotebookClient(document, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
