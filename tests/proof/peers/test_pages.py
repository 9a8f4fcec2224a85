"""The programs that the pages show of other trainers run beside those of drivetrain: ``make test-proof``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
pytestmark = pytest.mark.skipif(not os.environ.get("DRIVETRAIN_PEERS"), reason="run by make test-proof")


def printed(page: str, language: str, folder: Path) -> tuple[str, str]:
    """The output and the messages of a page's only program in a language; "py" marks the other trainer's."""
    [program] = re.findall(
        rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def test_the_loop_of_accelerate_and_that_on_the_engine_print_equal_losses(tmp_path: Path) -> None:
    theirs, _ = printed("from_accelerate.md", "py", tmp_path)
    assert theirs.count("loss") == 3
    assert printed("from_accelerate.md", "python", tmp_path)[0] == theirs


def test_the_programs_of_transformers_and_of_drivetrain_run(tmp_path: Path) -> None:
    assert "'train_loss'" in printed("from_hf_trainer.md", "py", tmp_path)[0]
    assert "36 steps" in printed("from_hf_trainer.md", "python", tmp_path)[1]


def test_the_programs_of_ignite_and_of_drivetrain_print_equal_losses(tmp_path: Path) -> None:
    theirs = printed("from_ignite.md", "py", tmp_path)[0].splitlines()
    assert [line.split(":")[0] for line in theirs] == ["epoch 0", "epoch 1", "epoch 2"]
    assert printed("from_ignite.md", "python", tmp_path)[0].splitlines()[-3:] == theirs
    assert [path.suffix for path in (tmp_path / "ignite").iterdir()] == [".pt"]
