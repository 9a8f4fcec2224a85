"""What the layer of earlier generations promises of itself."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

LEGACY = Path(__file__).parents[2] / "src" / "drivetrain" / "legacy"
ADAPTERS = [path for path in sorted(LEGACY.rglob("*.py")) if path.parent.name != "migrate"]


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.relative_to(LEGACY).as_posix())
def test_no_adapter_class_is_split_into_a_chain_of_private_bases(path: Path) -> None:
    """Whoever looks for a member should find it in one class: a private base is there for several classes."""
    text = path.read_text("utf-8")
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    bases = Counter(base.id for node in classes for base in node.bases if isinstance(base, ast.Name))
    private = (node.name for node in classes if node.name.startswith("_") and bases[node.name] == 1)
    assert [name for name in private if len(re.findall(rf"\b{name}\b", text)) == 2] == []


def test_nothing_outside_of_the_layer_imports_it() -> None:
    files = [path for path in LEGACY.parent.rglob("*.py") if LEGACY not in path.parents]
    pattern = re.compile(r"^\s*(from|import) drivetrain\.legacy", re.MULTILINE)
    assert [path.name for path in files if pattern.search(path.read_text("utf-8"))] == []
    assert any(pattern.search(path.read_text("utf-8")) for path in LEGACY.rglob("*.py"))  # it is found where it is
