"""An elastic job of torchrun: machines join, lose their power and come back; the training remains that of one."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
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
WAIT_S = 60
CUT_S, PAUSE_S = 20, 0.2  # the pause is that of elastic.py after a batch
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
        found = [row for row in csv.DictReader(file) if row["loss_step"]]  # others hold the goodput alone
    return [(int(row["step"]), float(row["loss_step"]), row["loss_epoch"]) for row in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "hurry").touch()
    subprocess.run([sys.executable, PROGRAM, folder], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return folder


class Machines:
    """Three machines, on which agents of torchrun are started; their processes write into one folder."""

    def __init__(self, nodes: Any, job: Any, wait_for: Callable[..., Any], **variables: str) -> None:
        self.nodes, self.folder = nodes, job.folder
        self._job, self._wait_for, self._variables = job, wait_for, {**VARIABLES, **variables}

    def join(self, number: int) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = self.nodes[number - 1].start(
            *TORCHRUN, PROGRAM, self.folder, output=self._job.log(number), **self._variables
        )
        return process

    def train_on(self, machines: int) -> None:
        """Wait until a new start has trained on so many machines, with steps that are not saved yet."""
        before = len(starts(self.folder))

        def trained() -> bool:
            found = starts(self.folder)
            return len(found) > before and found[-1].size == machines and found[-1].is_past_save

        self._wait_for(f"{machines} machines", trained, 2 * WAIT_S)  # torchrun's own limits come first

    def end(self, agents: dict[int, subprocess.Popen[bytes]]) -> None:
        (self.folder / "hurry").touch()
        assert [agent.wait(timeout=90) for agent in agents.values()] == [0, 0, 0]


@pytest.mark.daemon
def test_machines_come_and_go_and_the_run_remains_that_of_one_process(
    network: Any, job: Any, undisturbed: Path, wait_for: Callable[..., Any]
) -> None:
    with network(3) as nodes:
        machines = Machines(nodes, job, wait_for)
        agents = {1: machines.join(1)}
        machines.train_on(1)
        agents |= {2: machines.join(2), 3: machines.join(3)}
        machines.train_on(3)
        nodes[2].kill()  # the power of the machine
        machines.train_on(2)
        agents[3] = machines.join(3)
        machines.train_on(3)
        agents[2].kill()  # the agent alone: the process that trains is left
        agents[2].wait()
        agents[2] = machines.join(2)
        machines.train_on(3)
        machines.end(agents)
    check(job, undisturbed)


@pytest.mark.daemon
def test_the_network_of_a_machine_is_cut_for_20_seconds(
    network: Any, job: Any, undisturbed: Path, wait_for: Callable[..., Any]
) -> None:
    with network(3) as nodes:
        machines = Machines(nodes, job, wait_for, EXCHANGE_TIMEOUT_S="8")
        agents = {number: machines.join(number) for number in (1, 2, 3)}
        machines.train_on(3)
        cut = time.monotonic()
        nodes[2].plug(False)
        machines.train_on(2)  # from the newest checkpoint
        wait_for("the end of the cut", lambda: time.monotonic() - cut >= CUT_S)
        nodes[2].plug(True)
        machines.train_on(3)  # its agent has lived on, and joins
        machines.end(agents)
    in_vain = check(job, undisturbed)
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli.command", "goodput", job.folder / "checkpoints", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    ledger = json.loads(done.stdout)
    assert ledger["seconds"]["lost"] >= PAUSE_S * (in_vain - 1)
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_s"])
    # on three machines, on two, on three; more where a machine comes late
    assert ledger["runs"] == len(starts(job.folder)) >= 3


def check(job: Any, undisturbed: Path) -> int:
    """See that the run was that of one process; return how many batches were trained in vain."""
    folder: Path = job.folder
    # Each sample of each epoch once, in the order of one process.
    expected, _ = history(undisturbed)
    found, in_vain = history(folder)
    assert found == expected
    assert in_vain > 0  # not all were saved when a machine was lost
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
    return in_vain
