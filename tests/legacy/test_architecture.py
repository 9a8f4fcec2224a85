"""What the layer of earlier generations promises of itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LEGACY = Path(__file__).parents[2] / "src" / "drivetrain" / "legacy"
ADAPTERS = [path for path in sorted(LEGACY.rglob("*.py")) if path.parent.name != "migrate"]


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.relative_to(LEGACY).as_posix())
def test_no_adapter_class_has_more_than_80_lines(path: Path) -> None:
    classes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in classes}
    assert {name: length for name, length in lengths.items() if length > 80} == {}


def test_nothing_outside_of_the_layer_imports_it() -> None:
    files = [path for path in LEGACY.parent.rglob("*.py") if LEGACY not in path.parents]
    pattern = re.compile(r"^\s*(from|import) drivetrain\.legacy", re.MULTILINE)
    assert [path.name for path in files if pattern.search(path.read_text("utf-8"))] == []
    assert any(pattern.search(path.read_text("utf-8")) for path in LEGACY.rglob("*.py"))  # it is found where it is
