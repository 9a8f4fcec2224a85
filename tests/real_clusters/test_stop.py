"""A job under another launcher that is asked to end: with the options that docs/stopping.md names, it can save."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)

SAVE_S = 5  # that a save takes: longer than the launchers wait without an option
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]


def long_job(job: Any, *shape: Any) -> list[str]:
    command: list[str] = job.command(*shape, "--epochs", 100_000, "--pause", 0.1, "--slow-save", SAVE_S)
    return command


def saved(job: Any) -> list[str]:
    return [path.name for path in Path(job.folder).rglob("stopped.ckpt")]


def ended(
    node: Any, job: Any, wait_for: Callable[..., Any], number: int, launcher: list[str], program: list[str]
) -> int:
    """Return the exit code of a launcher that is sent a signal while the job trains."""
    process = node.start(*launcher, *program, output=job.log(0))
    wait_for("steps of both ranks", lambda: {event["rank"] for event in job.events(node.name)[6:]} == {0, 1})
    process.send_signal(number)
    code: int = process.wait(timeout=60)
    return code


# With the option, by either signal; and the negative control.
CASES = pytest.mark.parametrize(
    ("number", "saves"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGTERM, False)]
)


@CASES
def test_torchrun(nodes: Any, job: Any, wait_for: Callable[..., Any], number: signal.Signals, saves: bool) -> None:
    launcher = [*TORCHRUN, f"--shutdown-timeout={60 if saves else 1}"]
    assert ended(nodes[0], job, wait_for, number, launcher, long_job(job, "--devices", 2)[1:]) == 1
    assert saved(job) == ["stopped.ckpt"] * saves


@CASES
def test_mpirun(
    nodes: Any, job: Any, need: Callable[..., None], wait_for: Callable[..., Any], number: signal.Signals, saves: bool
) -> None:
    """Open MPI waits as long as the option says, also if all processes have ended before."""
    need("mpirun")
    pytest.importorskip("mpi4py")
    launcher = [*MPIRUN, *(["--mca", "odls_base_sigkill_timeout", "10"] if saves else [])]
    assert ended(nodes[0], job, wait_for, number, launcher, long_job(job, "--devices", 2)) != 0
    assert saved(job) == ["stopped.ckpt"] * saves


@pytest.mark.daemon
@pytest.mark.parametrize("option", [["--signal=TERM"], []], ids=["scancel --signal=TERM", "scancel"])
def test_slurm(slurm: Any, job: Any, wait_for: Callable[..., Any], option: list[str]) -> None:
    """Without the option, SLURM kills after its KillWait, which is 3 seconds here."""
    two = ("--nodes=1", "--ntasks-per-node=2")
    number = slurm.submit(job, two, "srun", *long_job(job, "--devices", 2, "--no-requeue"))
    wait_for("steps", lambda: job.events("n1")[6:] or job.events("n2")[6:])
    slurm.expect("scancel", *option, number)
    assert slurm.wait(number)["JobState"] == ("FAILED" if option else "CANCELLED")
    assert saved(job) == ["stopped.ckpt"] * bool(option)
