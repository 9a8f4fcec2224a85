"""One rank fails: the whole job ends soon, no process is left, and the report says which rank it was, and where."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer

PROGRAM = Path(__file__).with_name("fault_program.py")
LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"
SOON_S = 30.0 if LONG else 60.0  # generous for a machine at work: one that hangs takes half an hour
CODES = {"exception": 1, "kill": -9, "exit": 7, "segfault": -11, "abort": -6, "hang and die": 9}
PLACES = {
    "setup": "set up", "load": "set up", "data": "fetch", "forward": "forward", "backward": "(backward|forward)",
    "optimizer step": "(optimizer step|backward)", "checkpoint": "batch end", "validation": "validation batch",
    "teardown": "train end",
}  # fmt: skip
EACH_ONCE = [
    ("ddp_fork", "exception", "forward", 1, 2),
    ("ddp_fork", "kill", "backward", 0, 2),
    ("ddp_fork", "exit", "data", 1, 2),
    ("ddp_fork", "segfault", "optimizer step", 1, 2),
    ("ddp_fork", "exception", "setup", 0, 2),
    ("ddp_fork", "abort", "load", 1, 2),
    ("ddp_fork", "exception", "checkpoint", 1, 2),
    ("ddp_fork", "kill", "validation", 1, 2),
    ("ddp_fork", "exit", "teardown", 0, 2),
]


def pairwise() -> list[Any]:
    """Cases in which each pair of values of two of the parameters occurs at least once."""
    values: list[list[Any]] = [["ddp_fork", "ddp", "ddp_spawn"], list(CODES), list(PLACES), [0, 1], [2, 3]]
    chosen: list[Any] = []
    wanted = {((i, a), (j, b)) for i in range(5) for j in range(i) for a in values[i] for b in values[j]}
    cases = list(product(*values))
    random.Random(0).shuffle(cases)
    while wanted:
        best = max(cases, key=lambda case: len(wanted & pairs(case)))
        chosen.append(best)
        wanted -= pairs(best)
    return chosen


def pairs(case: Any) -> set[Any]:
    return {((i, case[i]), (j, case[j])) for i in range(5) for j in range(i)}


class Smallest(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def start_from(path: Path) -> None:
    """Write a checkpoint that the program can begin from."""
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Smallest(), DataLoader(torch.ones(4, 4), batch_size=2))
    trainer.save_checkpoint(path)


@pytest.mark.skipif(sys.platform != "linux", reason="the signals of POSIX")
@pytest.mark.parametrize(("strategy", "fault", "phase", "rank", "size"), pairwise() if LONG else EACH_ONCE)
def test_t31_a_rank_that_fails_ends_the_job_with_one_report(
    programs: Any, tmp_path: Path, strategy: str, fault: str, phase: str, rank: int, size: int
) -> None:
    if phase == "load":
        start_from(tmp_path / "start.ckpt")
    begin = time.monotonic()
    done = programs.run(PROGRAM, strategy, fault, phase, rank, size, cwd=tmp_path, timeout=SOON_S)
    seconds, said = time.monotonic() - begin, done.stderr
    assert "the fault was injected" in done.stdout  # the negative control of all that follows
    code = CODES[fault]
    in_program = strategy == "ddp"  # else the launching process raises a LaunchError
    assert done.returncode == ((code if code > 0 else 128 - code) if in_program else 1), said
    assert f"Rank {rank} of {size} (process " in said
    assert re.search(f"in the phase '{PLACES[phase]}'", said), said
    assert seconds < SOON_S
    if fault == "exception":
        assert "ValueError: of this rank alone" in said
        assert re.search(r"fault_program\.py:\d+ in fail", said)
        assert 'raise ValueError("of this rank alone")' in said  # of the traceback
    if code in (-11, -6):
        assert "Fatal Python error" in said
        assert "fault_program.py" in said
    pids = [int(pid) for pid in re.findall(r"process (\d+)\n", done.stdout)]
    assert len(pids) == size
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_job_without_a_fault_ends_well(programs: Any, tmp_path: Path) -> None:
    """The negative control: the program itself does not fail."""
    done = programs.run(PROGRAM, "ddp_fork", "none", "forward", 1, 2, cwd=tmp_path, timeout=SOON_S)
    assert (done.returncode, "injected" in done.stdout) == (0, True), done.stderr
