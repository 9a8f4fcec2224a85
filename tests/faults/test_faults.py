"""One rank fails: the whole job ends soon, no process is left, and the report says which rank it was, and where."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer

PROGRAM = Path(__file__).with_name("fault_program.py")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the signals of POSIX")
MODE = os.environ.get("DRIVETRAIN_FAULTS", "")
IS_LONG = MODE in ("long", "all")
SOON_S = 10.0 if IS_LONG else 60.0  # from the fault to the end of the job; generous for a machine at work
LIMIT_S = 90.0  # of a job: one that hangs takes half an hour

# The exit code of the process that fails; -n: the signal n. A rank that SIGTERM or Ctrl-C asks to end does not fail.
FAULTS = {
    "exception": 1, "no memory": 1, "sys.exit": 7, "exit": 8, "hang and die": 9, "kill": -9, "segfault": -11,
    "abort": -6, "SIGTERM": 143, "SIGINT": 130, "stop": 1,
}  # fmt: skip
ASKED = ("SIGTERM", "SIGINT")
STOPPED = {"DRIVETRAIN_STOPPED_TIMEOUT_S": "0.5"}  # after which a rank that is stopped counts as dead
# Where the report says that the rank was: a phase; "": before the Trainer's first run.
PHASES = {
    "import": "", "setup": "set up", "load": "set up", "data": "fetch", "forward": "forward",
    "backward": "(backward|forward)", "optimizer step": "(optimizer step|backward)", "log flush": "log flush",
    "checkpoint": "batch end", "validation": "validation batch", "teardown": "train end",
}  # fmt: skip
STARTS = ["ddp", "ddp_spawn", "torchrun"]  # "ddp_fork" is as "ddp_spawn", and starts sooner
# Each fault once and each phase once.
EACH_ONCE = [
    ("ddp", "exception", "import", 1, 2),
    ("ddp_fork", "exception", "setup", 0, 2),
    ("ddp_fork", "abort", "load", 1, 2),
    ("ddp_fork", "exit", "data", 1, 2),
    ("ddp_fork", "no memory", "forward", 1, 2),
    ("ddp_fork", "kill", "backward", 0, 2),
    ("ddp_fork", "stop", "backward", 1, 2),
    ("ddp_fork", "segfault", "optimizer step", 1, 2),
    ("ddp_fork", "SIGTERM", "log flush", 0, 2),
    ("ddp_fork", "sys.exit", "checkpoint", 1, 2),
    ("ddp_fork", "SIGINT", "validation", 1, 2),
    ("ddp_fork", "hang and die", "teardown", 0, 2),
]
Case = tuple[str, str, str, int, int]
"""How the processes start, the fault, the phase, the rank that fails, how many ranks there are."""


def product() -> list[Case]:
    """Return every case of ``make test-faults``: the last rank fails, or the first.

    A rank that is stopped ends the job only where the others wait for it.
    """
    return [
        (start, fault, phase, rank, size)
        for start, fault, phase, size in itertools.product(STARTS, FAULTS, PHASES, (2, 3))
        for rank in (0, size - 1)
        if fault != "stop" or phase not in ("import", "teardown")
    ]


def pairwise(seed: int) -> list[Case]:
    """Return cases in which each pair of values of two of the parameters occurs; another seed gives other cases."""
    draw, of_pair = random.Random(seed), dict[Any, list[Case]]()
    for case in product():
        for pair in pairs(case):
            of_pair.setdefault(pair, []).append(case)
    chosen: list[Case] = []
    while of_pair:
        rarest = of_pair[min(of_pair, key=lambda pair: (len(of_pair[pair]), pair))]
        some = draw.sample(rarest, min(40, len(rarest)))
        chosen.append(max(some, key=lambda case: sum(pair in of_pair for pair in pairs(case))))
        for pair in pairs(chosen[-1]):
            of_pair.pop(pair, None)
    return chosen


def pairs(case: Case) -> set[Any]:
    start, fault, phase, rank, size = case
    return set(itertools.combinations(enumerate(map(str, (start, fault, phase, rank > 0, size))), 2))


def chosen() -> list[Case]:
    if not IS_LONG:
        return EACH_ONCE
    return product() if MODE == "all" else pairwise(int(os.environ.get("DRIVETRAIN_SEED") or 0))


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


@ON_LINUX
@pytest.mark.parametrize(("start", "fault", "phase", "rank", "size"), chosen())
def test_t31_a_rank_that_fails_ends_the_job_with_one_report(
    programs: Any, tmp_path: Path, start: str, fault: str, phase: str, rank: int, size: int
) -> None:
    if phase == "load":
        start_from(tmp_path / "start.ckpt")
    run = ["-m", "torch.distributed.run", f"--nproc-per-node={size}"] if start == "torchrun" else []
    command = (*run, PROGRAM, start, fault, phase, rank, size)
    done = programs.run(*command, cwd=tmp_path, env={**os.environ, **STOPPED}, timeout=LIMIT_S)
    ended, said = time.monotonic(), done.stderr
    # The negative control of what follows: the fault came, and once.
    [injected] = re.findall(r"the fault was injected at ([\d.]+)\n", done.stdout)
    assert ended - float(injected) < SOON_S
    assert done.returncode == code_of(start, fault), said
    if start == "torchrun":
        check_torchrun(said, fault, rank)
    if fault == "stop":
        check_message(said, rank)
    elif start == "torchrun" and phase == "import":  # no rank has a report yet
        pass
    elif fault not in ASKED:
        check_report(said, start, fault, phase, rank, size)
    pids = [int(pid) for pid in re.findall(r"process (\d+)\n", done.stdout)]
    assert len(pids) == size or phase in ("import", "setup")  # then the others may not have come so far
    assert not any(psutil.pid_exists(pid) for pid in pids)


def code_of(start: str, fault: str) -> int:
    """Return the exit code of the program, as docs/faults.md has it."""
    code = FAULTS[fault]
    if start == "torchrun" or (start != "ddp" and fault not in ASKED):
        return 1  # torchrun's own, and that of a program that raises a LaunchError
    return 128 - code if code < 0 else code


def check_report(said: str, start: str, fault: str, phase: str, rank: int, size: int) -> None:
    """Check that drivetrain's launcher has named rank, phase and step, and what the process could tell."""
    assert f"Rank {rank} of {size} (process " in said
    if PHASES[phase]:
        assert re.search(f"in the phase '{PHASES[phase]}', after \\d+ batches had begun, in step \\d", said), said
    else:
        assert start != "ddp" or "before its first run" in said, said
    if fault == "sys.exit" and phase != "import":
        assert "raised SystemExit: 7" in said
        assert re.search(r"fault_program\.py:\d+ in fail", said)
        assert "sys.exit(7)" in said  # of the traceback
    if fault in ("exception", "no memory"):
        error = "ValueError" if fault == "exception" else "MemoryError"
        assert f"{error}: of this rank alone" in said
        assert f'raise {error}("of this rank alone")' in said  # of the traceback
        assert phase == "import" or re.search(r"fault_program\.py:\d+ in fail", said)
    if fault in ("segfault", "abort") and phase != "import":
        assert "Fatal Python error" in said
        assert "fault_program.py" in said


def check_torchrun(said: str, fault: str, rank: int) -> None:
    """Check that torchrun names the rank, and that the traceback of an exception is in the output."""
    assert fault == "stop" or f"(local_rank: {rank})" in said
    if fault in ("exception", "no memory"):
        assert '("of this rank alone")' in said


def check_message(said: str, rank: int) -> None:
    """Check what is said of a rank that is stopped, and so cannot fail by itself."""
    assert re.search(rf"Rank {rank} \(process \d+\) is stopped for \d+ s \(state T\), in the phase '", said), said
    assert f"Missing: rank {rank}." in said
    assert "The job is ended, because no rank can continue." in said


def test_the_covering_has_every_pair_and_the_first_choice_every_value() -> None:
    """And another seed chooses other cases."""
    wanted = set().union(*map(pairs, product()))
    for seed in (0, 1):
        assert set().union(*map(pairs, pairwise(seed))) == wanted
    assert set(pairwise(0)) != set(pairwise(1))
    assert {fault for _, fault, *_ in EACH_ONCE} == set(FAULTS)
    assert {phase for _, _, phase, *_ in EACH_ONCE} == set(PHASES)


@ON_LINUX
def test_a_job_without_a_fault_ends_well(programs: Any, tmp_path: Path) -> None:
    """The negative control: the program itself does not fail."""
    done = programs.run(PROGRAM, "ddp_fork", "none", "forward", 1, 2, cwd=tmp_path, timeout=LIMIT_S)
    assert (done.returncode, "injected" in done.stdout) == (0, True), done.stderr
