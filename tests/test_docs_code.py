"""The Python of a page runs as it stands: its blocks one after the other, in one program."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "hardware.md", "own_accelerator.md", "own_strategy.md", "own_store.md", "own_precision.md", "own_parts.md",
    "own_launcher.md", "own_cluster.md", "own_logger.md", "own_loader.md",
    "dp.md", "horovod.md", "legacy.md", "remote.md", "start.md", "lightning_module.md", "from_accelerate.md",
    "from_hf_trainer.md", "from_ignite.md", "questions.md", "tables.md",
]  # fmt: skip

# What the pages take for granted: a model and a loader.
GIVEN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import LightningModule

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model, loader = Net(), DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
del LightningModule, DataLoader, TensorDataset
"""


def program(page: str, text: str) -> str:
    """The blocks as one program, whose tracebacks name the page and its lines."""
    parts = [GIVEN]
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        above = text.count("\n", 0, block.start(1))
        parts.append(f"exec(compile({chr(10) * above + block[1]!r}, {page!r}, 'exec'))")
    assert len(parts) > 1, f"{page} has no Python"
    return "\n".join(parts)


def run(programs: Any, page: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    folders = [str(ROOT / "tests" / "accelerators"), str(ROOT / "src")]  # where xpulib is
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    line = ("-W", "error", "-c", program(page, text))
    done: subprocess.CompletedProcess[str] = programs.run(*line, cwd=folder, env=environ, merged=True)
    return done


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(programs: Any, page: str, tmp_path: Path) -> None:
    done = run(programs, page, (ROOT / "docs" / page).read_text(encoding="utf-8"), tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_plain_loop_and_the_trainer_print_equal_losses(programs: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "from_plain_loop.md").read_text(encoding="utf-8")
    found = []
    for text in (page, page.replace("```python\n", "```text\n").replace("```py\n", "```python\n")):
        done = run(programs, "from_plain_loop.md", text, tmp_path)
        assert done.returncode == 0, done.stdout
        found.append(re.findall(r"^(?:epoch \d|best): .*", done.stdout, re.MULTILINE))
    ours, theirs = found
    assert len(theirs) == 4
    assert ours == theirs
    assert (tmp_path / "best.pt").exists()  # the loop's, so the two were not the same program


def test_what_does_not_run_is_found(programs: Any, tmp_path: Path) -> None:
    """The control; the traceback leads to the page."""
    done = run(programs, "page.md", "One.\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", tmp_path)
    assert done.returncode == 1
    assert 'File "page.md", line 8' in done.stdout
    assert "AssertionError" in done.stdout
