"""The recipe of reinforcement learning runs as it stands, with gymnasium, and learns."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "reinforce.py"


def test_a_policy_learns_to_balance_a_pole(tmp_path: Path) -> None:
    program: dict[str, Any] = runpy.run_path(str(RECIPE))
    assert program["main"](str(tmp_path), updates=15) > 60  # an untrained policy's episodes have some 22 steps
