"""The recipe of LoRA runs as it stands, with transformers and peft, and learns."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "lora.py"


@pytest.mark.filterwarnings("ignore")  # of peft and transformers, of each other
def test_a_model_of_a_hub_is_fine_tuned(tmp_path: Path) -> None:
    program: dict[str, Any] = runpy.run_path(str(RECIPE))
    assert program["main"](str(tmp_path), epochs=2) < 1.5  # an untrained model's is 4.16
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 500_000
