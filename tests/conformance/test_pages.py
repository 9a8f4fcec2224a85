"""Each page of docs/own_*.md shows a file that passes the checks for its kind."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.test_kits import SLOW, only_in_long_form

from drivetrain.clusters.environment import ClusterRegistry
from drivetrain.testing import check_part

DOCS = Path(__file__).parents[2] / "docs"
TASK = {"hosts": ["a"], "port": 29500, "host": 0, "devices": 2}
RANKS = [{"QUEUE_TASK": json.dumps(TASK | {"device": device})} for device in range(2)]

# kind: the class of the page, its arguments, the settings of the checks
SHOWN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "accelerator": ("XPUAccelerator", {}, {}),
    "strategy": ("RoundedGradients", {}, {"tolerance": 0.05}),
    "launcher": ("PipesLauncher", {}, {}),
    "cluster": ("QueueEnvironment", {}, {"ranks": RANKS}),
    "logger": ("JSONLogger", {"folder": "."}, {}),
    "store": ("MemoryIO", {}, {}),
    "precision": ("TrainInBF16", {}, {}),
    "loader": ("ShuffledRows", {}, {}),
}


def shown(kind: str, name: str) -> str:
    """The block of the page that defines the class, without the lines below it that use it."""
    text = (DOCS / f"own_{kind}.md").read_text(encoding="utf-8")
    block = next(
        each
        for each in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if re.search(rf"^class {name}\b", each, re.MULTILINE)
    )
    before, defined, rest = block.partition(f"class {name}")
    return before + defined + re.split(r"^(?=\S+ = |for |trainer\.)", rest, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.timeout(300)
def test_the_file_of_a_page_passes_the_checks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_in_long_form(kind in SLOW)
    name, arguments, settings = SHOWN[kind]
    (tmp_path / f"own_{kind}.py").write_text(shown(kind, name), encoding="utf-8")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "accelerators")  # the module of a device that is made up
    monkeypatch.syspath_prepend(tmp_path)
    outcomes = check_part(kind, f"own_{kind}:{name}", arguments, settings)
    sys.modules.pop(f"own_{kind}", None)
    if kind == "cluster":
        ClusterRegistry.remove("queue")
    assert "ok" in {each.result for each in outcomes}
