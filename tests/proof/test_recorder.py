"""What the process of a program records: its parts, their names, and only the process that trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from drivetrain.proof.recorder import state_of_optimizer
from drivetrain.proof.records import VARIABLE, Start, forked_of, path_of, read, start_of, unpacked

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORKERS, CLOSURE, STEPS = (int(word) for word in sys.argv[1:])
torch.manual_seed(0)
data = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12.0))
model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
for index, (x, y) in enumerate(DataLoader(data, 3, num_workers=WORKERS)):
    if index == STEPS:
        break

    def compute():
        optimizer.zero_grad()
        loss = (model(x).squeeze() - y).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        model(x + 100)  # an evaluation is no part of the training
    if not CLOSURE:
        print(compute().item())
    optimizer.step(*([compute] if CLOSURE else []))
    average.update_parameters(model)
"""


class Recorded:
    """Runs the program above in a folder."""

    def __init__(self, programs: Any, folder: Path, text: str = PROGRAM) -> None:
        self.programs, self.folder, self.count = programs, folder, 0
        (folder / "program.py").write_text(text)

    def run(self, workers: int = 0, closure: int = 0, steps: int = 4, **asked: Any) -> tuple[int, list[str], Start]:
        """Return the exit code, what the program printed, and its records."""
        parent = self.programs._start() and self.programs._server.pid  # whose copies are the programs
        asked = {"folder": str(self.folder), "start": self.count, "parent": parent, **asked}
        self.count += 1
        done = self.programs.run(
            "-m", "drivetrain.proof.child", "program.py", workers, closure, steps, cwd=self.folder,
            env={**os.environ, VARIABLE: json.dumps(asked)},
        )  # fmt: skip
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode, done.stdout.split(), start_of(self.folder, asked["start"], 0)


@pytest.fixture(scope="module")
def recorded(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(programs, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def plain(recorded: Recorded) -> tuple[int, list[str], Start]:
    """The first run, without workers and closure."""
    return recorded.run()


def test_a_step_is_recorded_with_the_names_and_values_of_its_parts(plain: Any) -> None:
    _, printed, found = plain
    assert len(found.steps) == 4
    assert found.end is not None
    first, second = found.steps[:2]
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert second["names"]["parameters"] == second["names"]["gradients"] == parameters
    assert second["names"]["optimizer"][:3] == ["step of 0.weight", "exp_avg of 0.weight", "exp_avg_sq of 0.weight"]
    assert second["names"]["model"] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [kind for kind, _ in second["others"]] == ["AveragedModel"]
    assert second["values"]["hyperparameters"]["lr of group 0"] == 0.125
    assert [len(each["since"]["inputs"]) for each in found.steps] == [1, 1, 1, 1]
    assert [each["since"]["losses"][0][0] for each in found.steps] == [float(text) for text in printed]
    old, new = (unpacked(each["tensors"]["parameters"]) for each in (first, second))
    assert all(a != b for a, b in zip(old, new, strict=True))


def test_a_program_whose_optimizer_has_another_order_records_the_same(
    plain: Any, programs: Any, tmp_path: Path
) -> None:
    other = Recorded(programs, tmp_path, PROGRAM.replace("Adam(model.parameters()", "Adam([*model.parameters()][::-1]"))
    for here, there in zip(plain[2].steps, other.run()[2].steps, strict=True):
        assert all(here[part] == there[part] for part in ("names", "tensors", "values", "since"))


def test_parameters_with_equal_names_are_all_recorded(programs: Any, tmp_path: Path) -> None:
    text = (
        "import torch\nfrom torch import nn\nnets = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 1))\n"
        "parameters = [*nets[0].parameters(), *nets[1].parameters(), torch.ones(1)]\n"
        "torch.optim.Adam(parameters).step()\n"
    )
    [step] = Recorded(programs, tmp_path, text).run()[2].steps
    names = ["0.weight", "0.bias", "0.weight of module 2", "0.bias of module 2", "parameter 4"]
    assert step["names"]["parameters"] == names
    assert len(unpacked(step["tensors"]["parameters"])) == 5


def test_state_of_an_optimizer_is_read_from_nested_containers_too() -> None:
    weight = torch.zeros(2)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    first, last = torch.ones(2), torch.ones(3)
    optimizer.state[weight] = {"history": {"gradients": [first, last], "count": 7}, "name": "x", "mean": weight}
    optimizer.state["steps"] = 3
    tensors, values = state_of_optimizer(optimizer, {id(weight): "weight"})
    assert tensors.keys() == {"history 0 of weight", "history 1 of weight", "mean of weight"}
    assert tensors["history 1 of weight"] is last
    assert {name: value for name, value in values.items() if "group" not in name} == {
        "history 2 of weight": 7, "state of 'steps'": 3,
    }  # fmt: skip


def test_two_runs_record_the_same_whatever_the_number_of_workers(plain: Any, recorded: Recorded) -> None:
    _, _, other = recorded.run(workers=2)
    for here, there in zip(plain[2].steps, other.steps, strict=True):
        assert here["tensors"] == there["tensors"]
        assert here["since"] == there["since"]


def test_loss_and_gradients_of_a_closure_belong_to_the_step_that_calls_it(plain: Any, recorded: Recorded) -> None:
    _, _, closure = recorded.run(closure=1)
    for here, there in zip(plain[2].steps, closure.steps, strict=True):
        assert here["tensors"]["gradients"] == there["tensors"]["gradients"]
        assert here["tensors"]["parameters"] == there["tensors"]["parameters"]
        assert here["since"] == there["since"]


def test_the_program_is_killed_in_the_step_of_the_undisturbed_run(plain: Any, recorded: Recorded) -> None:
    code, _, found = recorded.run(steps=10**6, undisturbed=str(recorded.folder), kill=(2, 0.0))
    assert code == -signal.SIGKILL
    assert found.end is None
    assert len(found.steps) in (3, 4)


def test_the_end_of_a_process_of_multiprocessing_is_recorded(recorded: Recorded) -> None:
    program = recorded.folder / "program.py"
    body = "".join(f"    {line}\n" for line in PROGRAM.splitlines())
    start = "process = get_context('fork').Process(target=train)\nprocess.start()\nprocess.join()\n"
    program.write_text(f"def train():\n{body}\nfrom multiprocessing import get_context\n{start}")
    try:
        _, _, found = recorded.run()
    finally:
        program.write_text(PROGRAM)
    assert len(found.steps) == 4
    assert found.end is not None


FORK = """
import os
child = os.fork()
import torch
torch.manual_seed(2 if child else 1)
torch.manual_seed = lambda seed: None
"""
WAIT = "\nif child:\n    os.waitpid(child, 0)\n"


@pytest.fixture
def forking(recorded: Recorded) -> Iterator[Recorded]:
    """The program forks, and both processes make four steps with weights of their own."""
    (recorded.folder / "program.py").write_text(FORK + PROGRAM + WAIT)
    yield recorded
    (recorded.folder / "program.py").write_text(PROGRAM)


def test_a_process_and_one_that_it_has_forked_have_records_of_their_own(forking: Recorded) -> None:
    _, printed, found = forking.run()
    [forked] = forked_of(forking.folder, forking.count - 1, 0)
    losses = [[step["since"]["losses"][0][0] for step in each.steps] for each in (found, read(forked))]
    assert sorted(map(len, losses)) == [4, 4]
    assert sorted(map(float, printed)) == sorted(losses[0] + losses[1])
    assert losses[0] != losses[1]
    assert found.end is not None
    # The steps of the forked process count where there are no others.
    path_of(forking.folder, forking.count - 1, 0).unlink()
    assert start_of(forking.folder, forking.count - 1, 0) == read(forked)


def test_a_restart_records_the_process_that_the_undisturbed_run_compares(plain: Any, forking: Recorded) -> None:
    assert plain[2].steps  # of a process that was not forked
    _, _, found = forking.run(undisturbed=str(forking.folder), kill=(10**6, 0.0))
    assert len(found.steps) == 4
    assert forked_of(forking.folder, forking.count - 1, 0) == []


def test_a_record_that_the_kill_has_cut_is_left_out(plain: Any, recorded: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(path_of(recorded.folder, 0, 0).read_bytes()[:-40])
    assert (len(read(path).steps), read(path).end) == (4, None)
    assert plain[2].end is not None


def test_a_program_that_makes_no_step_leaves_no_record(recorded: Recorded) -> None:
    _, _, found = recorded.run(steps=0)
    assert (found, list(recorded.folder.glob(f"start-{recorded.count - 1:02d}*"))) == (Start(), [])


def test_a_kill_ends_the_job_and_no_other_process_of_the_one_that_has_started_it() -> None:
    """The prover may be a test suite, with processes of its own."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    below = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid, flush=True)"
    kills = "from drivetrain.proof.recorder import kill_job; import os; kill_job(os.getppid())"
    job = subprocess.Popen(
        [sys.executable, "-c", f"{below}; {kills}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdin is not None
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    assert job.wait(60) == -signal.SIGKILL
    assert job.stdout.read() == ""  # the process below held the other end, and has ended
    with suppress(psutil.NoSuchProcess):
        below_it = psutil.Process(pid)
        while below_it.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        ):  # its files are closed a little before
            time.sleep(0.01)
    assert other.poll() is None
    other.communicate(b"\n")
    job.stdin.close()
    job.stdout.close()
