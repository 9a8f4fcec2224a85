"""A rank that dies while several write a checkpoint in the background: no rank hangs, the one before stays."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("background_program.py")
LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied")


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1] if LONG else [1])
def test_a_run_whose_rank_died_in_a_save_resumes_and_ends_as_an_undisturbed_one(
    programs: Any, tmp_path: Path, strategy: str, rank: int
) -> None:
    def run(folder: str, dies: int) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        return programs.run(PROGRAM, strategy, dies, cwd=tmp_path / folder, env=dict(os.environ))

    undisturbed = run("undisturbed", -1)
    assert undisturbed.returncode == 0, undisturbed.stderr
    died = run("died", rank)
    assert "the fault was injected" in died.stdout, died.stderr
    assert died.returncode != 0
    resumed = run("died", -1)
    assert "Resuming from" in resumed.stderr
    # torch 2.9 also prints which ranks are connected
    printed = [re.findall(r"^weights .*", each.stdout, re.MULTILINE) for each in (resumed, undisturbed)]
    assert printed[0] == printed[1] != []
    left = sorted(os.listdir(tmp_path / "died" / "saved"))
    assert [name.split(".")[0] for name in left if "step=6" not in name] == ["epoch=0-step=8"] * 2 + ["last"], left
