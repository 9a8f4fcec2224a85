"""An elastic job of torchrun: machines join, lose their power and come back; the training remains that of one."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)

PROGRAM = Path(__file__).with_name("elastic.py")
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "9",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:29400",
    # late and lost machines are noticed in seconds
    "--monitor-interval", "0.2", "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
]  # fmt: skip
# Without the first, a machine that joins and all others wait for each other (torch 2.13).
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DRIVETRAIN_RESUME": "auto"}
STEPS_OF_EPOCH, SAVES_EVERY = 3, 4
Position = tuple[int, int]  # epoch and batch


class Start:
    """What the processes of one start of the program were given."""

    def __init__(self, folder: Path, start: str) -> None:
        ranks = sorted(folder.glob(f"{start}-*.jsonl"))
        self.size = int(ranks[0].stem.rpartition("-")[2])
        self.batches: dict[Position, list[int]] = {}
        for path in ranks:
            for line in path.read_text().split("\n")[:-1]:
                epoch, batch, numbers = json.loads(line)
                self.batches.setdefault((epoch, batch), []).extend(numbers)

    @property
    def is_past_save(self) -> bool:
        """Whether the newest step of several is not saved yet, nor the one before."""
        epoch, batch = max(self.batches)
        return len(self.batches) > 6 and (epoch * STEPS_OF_EPOCH + batch // 2) % SAVES_EVERY == 2


def starts(folder: Path) -> list[Start]:
    return [Start(folder, name) for name in sorted({path.name.split("-")[0] for path in folder.glob("*.jsonl")})]


def history(folder: Path) -> tuple[list[tuple[Position, list[int]]], int]:
    """The batches whose effect the last weights have, in order; and how many were trained in vain."""
    done: dict[Position, list[int]] = {}
    in_vain = 0
    for start in starts(folder):
        lost = [position for position in done if position >= min(start.batches)]
        for position in lost:
            del done[position]
        in_vain += len(lost)
        done |= start.batches
    return list(done.items()), in_vain


def rows(folder: Path) -> list[tuple[int, float, str]]:
    """Step, loss, and the epoch's mean, of each row."""
    with open(folder / "log" / "metrics.csv") as file:
        return [(int(row["step"]), float(row["loss_step"]), row["loss_epoch"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "hurry").touch()
    subprocess.run([sys.executable, PROGRAM, folder], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return folder


@pytest.mark.daemon
def test_machines_come_and_go_and_the_run_remains_that_of_one_process(
    network: Any, job: Any, undisturbed: Path, wait_for: Callable[..., Any]
) -> None:
    folder: Path = job.folder
    with network(3) as nodes:

        def join(number: int) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes] = nodes[number - 1].start(
                *TORCHRUN, PROGRAM, folder, output=job.log(number), **VARIABLES
            )
            return process

        def train_on(machines: int) -> None:
            before = len(starts(folder))

            def trained() -> bool:
                found = starts(folder)
                return len(found) > before and found[-1].size == machines and found[-1].is_past_save

            wait_for(f"{machines} machines", trained)

        agents = {1: join(1)}
        train_on(1)
        agents |= {2: join(2), 3: join(3)}
        train_on(3)
        nodes[2].kill()  # the power of the machine
        train_on(2)
        agents[3] = join(3)
        train_on(3)
        agents[2].kill()  # the agent alone: the process that trains is left
        agents[2].wait()
        agents[2] = join(2)
        train_on(3)
        (folder / "hurry").touch()
        assert [agent.wait(timeout=90) for agent in agents.values()] == [0, 0, 0]

    # Each sample of each epoch once, in the order of one process.
    expected, _ = history(undisturbed)
    found, in_vain = history(folder)
    assert found == expected
    assert in_vain > 0  # the machine that lost its power had not saved all of them
    # One curve of losses.
    assert [step for step, *_ in rows(folder)] == list(range(len(rows(undisturbed))))
    for (_, loss, mean), (_, same, its_mean) in zip(rows(folder), rows(undisturbed), strict=True):
        assert loss == pytest.approx(same, rel=1e-9)
        assert bool(mean) == bool(its_mean)
        assert not mean or float(mean) == pytest.approx(float(its_mean), rel=1e-9)
    weights = [json.loads((folder / f"weights{rank}.json").read_text()) for rank in range(3)]
    assert weights[0] == weights[1] == weights[2]
    assert weights[0] == pytest.approx(json.loads((undisturbed / "weights0.json").read_text()), rel=1e-9)
    # One line for each start but the first.
    lines = [line for line in job.log(1).read_text().splitlines() if line.startswith("Resuming from ")]
    assert len(lines) >= len(starts(folder)) - 1
    for change in ("processes 2 (was 3)", "processes 3 (was 2)"):
        assert any(change in line for line in lines)
