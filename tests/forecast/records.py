"""The record of a program, as drivetrain plan makes it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any


def steps_of(programs: Any, folder: Path, devices: int, program: Path, *words: str) -> list[Any]:
    """Return the operations and exchanges of a window of a program, as rank 0 of ``devices`` on one machine."""
    result = folder / "result"
    asked = {
        "result": str(result), "devices": devices, "per_node": devices, "rank": 0, "on_host": False, "memory": None,
        "tries": False,
    }  # fmt: skip
    env = {**os.environ, "DRIVETRAIN_PLAN": json.dumps(asked)}
    done = programs.run("-m", "drivetrain.forecast.child", program, *words, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    found = pickle.loads(result.read_bytes())
    assert "base" in found, found
    return list(found["base"].recorded.steps)
