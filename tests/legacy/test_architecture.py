"""What the layer of earlier generations promises of itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LEGACY = Path(__file__).parents[2] / "src" / "drivetrain" / "legacy"


@pytest.mark.parametrize("path", sorted(LEGACY.rglob("*.py")), ids=lambda path: path.relative_to(LEGACY).as_posix())
def test_no_adapter_class_has_more_than_80_lines(path: Path) -> None:
    classes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in classes}
    assert {name: length for name, length in lengths.items() if length > 80} == {}


def test_nothing_outside_of_the_layer_imports_it() -> None:
    found = []
    for path in LEGACY.parent.rglob("*.py"):
        if LEGACY not in path.parents:
            nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
            found += [path.name for node in nodes if (node.module or "").startswith("drivetrain.legacy")]
    assert found == []
