"""Ray: actors that train on a cluster of this machine alone, on one that runs already, and on two machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("ray_program.py")
STARTED = ROOT / "tests" / "distributed" / "started_program.py"
DIGITS = ROOT / "examples" / "digits.py"
RAY = Path(sys.executable).with_name("ray")
RUN_S = 280  # with one core of two taken by something else, the longest program takes 170
SOON_S = 60  # the others would have slept for ten minutes
PORT = 6379

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the package ray is not installed")


def run(command: list[Any], variables: dict[str, str]) -> str:
    """What a program wrote that must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def found_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False)  # a program of these tests wrote it
    return found


# ---- a cluster for one call ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a fit and a prediction leave, of actors and of spawned processes; the classes are of the program's file."""
    folder = tmp_path_factory.mktemp("fitted")
    for method in ("ray", "spawn"):
        run(["-W", "error", STARTED, method, folder / method], variables)
    return {method: found_in(folder / method)["fitted"] for method in ("ray", "spawn")}


def test_actors_train_what_spawned_processes_train(fitted: dict[str, dict[str, Any]]) -> None:
    assert fitted["ray"]["moved"]
    for what in ("weights", "predicted"):
        assert torch.equal(fitted["ray"][what], fitted["spawn"][what])
    assert fitted["ray"]["dtype"] is torch.float64


@pytest.mark.parametrize("what", ["steps", "rate", "counters", "metrics", "logged", "written", "loaders"])
def test_the_launching_process_has_what_it_has_after_spawned_ones(fitted: dict[str, dict[str, Any]], what: str) -> None:
    assert fitted["ray"][what] == fitted["spawn"][what]


def test_the_states_of_callbacks_come_back(fitted: dict[str, dict[str, Any]]) -> None:
    epochs, best_path, *scores = fitted["ray"]["callbacks"]
    spawned_epochs, spawned_path, *spawned_scores = fitted["spawn"]["callbacks"]
    assert (epochs, Path(best_path).name, scores) == (spawned_epochs, Path(spawned_path).name, spawned_scores)


def test_the_demo(variables: dict[str, str], tmp_path: Path) -> None:
    text = run([DIGITS, "--devices", 2, "--strategy", "ddp_ray", "--output", tmp_path], variables)
    assert text.count("Test accuracy:") == 1  # below what is required the program fails
    assert (tmp_path / "digits.png").exists()


ALONE = """
import os, signal, ray
from drivetrain.clusters import LocalEnvironment
from drivetrain.launchers import RayLauncher

def speak():
    print(f"rank {os.environ['RANK']} has spoken")

before = signal.getsignal(signal.SIGTERM)
RayLauncher(LocalEnvironment(), 2).launch(speak)
print("connected:", ray.is_initialized(), "handler kept:", signal.getsignal(signal.SIGTERM) is before)
"""


def test_last_words_are_heard_and_nothing_stays(variables: dict[str, str]) -> None:
    text = run(["-c", ALONE], variables)
    assert "rank 0 has spoken" in text
    assert "rank 1 has spoken" in text
    assert "connected: False handler kept: True" in text


# ---- a cluster that runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("program") / "found.pt"
    threads = {name: value for name, value in variables.items() if name != "OMP_NUM_THREADS"}
    run(["-W", "error", PROGRAM, path], threads)
    return found_in(path)


def test_t45_each_process_knows_who_it_is(found: dict[str, Any]) -> None:
    common = {"NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MINE": "here"}
    for rank, (told, threads, *_) in enumerate(found["returned"]["facts"]):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        assert told == {**common, **own, "OTHER_VISIBLE_DEVICES": None, "OMP_NUM_THREADS": "1"}
        assert threads == 1  # as many as Ray has reserved processors


def test_t45_random_state_and_directory_travel(found: dict[str, Any]) -> None:
    assert [facts[2:] for facts in found["returned"]["facts"]] == [found["returned"]["here"]] * 2


def test_t45_tensors_are_copies_and_classes_of_the_program_are_its_own_when_they_come_back(
    found: dict[str, Any],
) -> None:
    returned = found["returned"]
    assert returned["sums"] == [0.0, 1000.0, 0.0]  # rank 0 has added to its copy of the second row
    assert returned["class"]
    assert returned["memory"]  # rows of one table still are


def test_the_same_trainer_validates_and_fits_again(found: dict[str, Any]) -> None:
    again = found["fits_again"]
    assert again["validated"][0]["val_loss"] == pytest.approx(again["metrics"]["val_loss"], rel=1e-12)
    assert again["best"][0]["val_loss"] == pytest.approx(again["best_score"], rel=1e-12)
    assert again["again"] == (15, 2, True)  # validating the best checkpoint, of the first epoch, restores the callback


def test_t26_a_checkpoint_of_the_launching_process_goes_on_exactly(found: dict[str, Any]) -> None:
    (whole_step, whole), (step, resumed) = found["resumed"]["after 3"], found["resumed"]["after 2"]
    assert whole_step == step == 15
    assert torch.equal(whole, resumed)


def test_a_scheduler_that_cannot_travel_leaves_its_state(found: dict[str, Any]) -> None:
    assert found["lambda"] == 1


def test_a_cluster_of_the_programs_own_stays(found: dict[str, Any]) -> None:
    assert found["connected"]


# ---- when one fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said", "cause", "exit_code"),
    [
        ("raises", " raised Mine: of rank 1", "Mine", 1),
        ("exits", " ended before its function returned; what it wrote stands above.", "NoneType", 3),
        ("is killed", " died before it could report.", "ActorDiedError", 1),
        ("is killed in an exchange", " died before it could report.", "ActorDiedError", 1),
    ],
)
def test_t31_the_rank_that_failed_is_named_and_the_others_are_killed(
    found: dict[str, Any], how: str, said: str, cause: str, exit_code: int
) -> None:
    kind, rank, code, message, found_cause, is_the_programs_own, seconds, alive = found["failed"][how]
    assert (kind, rank, code, found_cause) == ("LaunchError", 1, exit_code, cause)
    assert message.startswith("Rank 0 was in a program on the Engine")
    assert "\nRank 1 of 2 (an actor of Ray on " in message
    assert said in message
    assert is_the_programs_own == (how == "raises")
    assert seconds < SOON_S
    assert alive == []


def test_an_interrupt_of_one_interrupts_all(found: dict[str, Any]) -> None:
    kind, *_, seconds, alive = found["failed"]["interrupts"]
    assert (kind, alive) == ("KeyboardInterrupt", [])
    assert seconds < SOON_S


def test_t31_callbacks_hear_of_it_once(found: dict[str, Any]) -> None:
    told = found["told"]
    assert (told["cause"], told["status"]) == ("ZeroDivisionError('of rank 1')", "interrupted")
    notes = told["notes"].splitlines()
    assert notes.count("1 ZeroDivisionError") == 1
    assert not any("LaunchError" in note for note in notes)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no room", "{'CPU': 3.0} on each: 0 of its machines are that large. The whole cluster has {'CPU': 2.0}."),
        ("no machine", "num_nodes=2 with {'CPU': 1.0} on each: 1 of its machines are that large. "),
        ("unpicklable", "cannot pickle 'generator' object. Create it where it is used: in setup"),
        ("unpicklable result", "The result of rank 0 cannot be pickled, to be sent to another process: cannot pickle"),
        ("nobody there", "Ray cannot be reached at the address '127.0.0.1:1': "),
    ],
)  # fmt: skip
def test_what_cannot_be_launched(found: dict[str, Any], case: str, said: str) -> None:
    assert said in found["refused"][case]


INTERRUPTED = """
import os, sys, time
from drivetrain.clusters import LocalEnvironment
from drivetrain.launchers import RayLauncher

def wait(folder):
    with open(f"{folder}/{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)

try:
    RayLauncher(LocalEnvironment(), 2).launch(wait, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl_c", "killed"])
def test_nobody_is_left_when_the_launching_process_ends(
    variables: dict[str, str], tmp_path: Path, how: signal.Signals, wait_for: Callable[..., Any]
) -> None:
    def started() -> list[psutil.Process]:
        texts = [path.read_text() for path in tmp_path.glob("[01]")]
        return [psutil.Process(int(text)) for text in texts] if len(texts) == 2 and all(texts) else []

    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    process = subprocess.Popen([sys.executable, program, tmp_path], env=variables, stdout=subprocess.PIPE, text=True)
    with process:
        others = wait_for("both actors", started)
        if how is signal.SIGINT:  # after a kill, Ray's own agents stay for a minute
            others += psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        text, _ = process.communicate(timeout=SOON_S)
    _, alive = psutil.wait_procs(others, timeout=SOON_S)
    assert alive == []
    assert ("interrupted" in text) == (how is signal.SIGINT)


LONG_FIT = ["--strategy", "ddp_ray", "--epochs", 100_000, "--pause", 0.1, "--slow-save", 3]


def saved(job: Any) -> list[str]:
    return [path.name for path in Path(job.folder).rglob("stopped.ckpt")]


@pytest.mark.parametrize(
    ("number", "to", "code"),
    [(signal.SIGTERM, "the program", 143), (signal.SIGINT, "the program", 130), (signal.SIGTERM, "one actor", 143)],
    ids=["SIGTERM", "Ctrl-C", "SIGTERM to one actor"],
)
def test_t32_a_fit_that_is_asked_to_end_saves_once(
    variables: dict[str, str], job: Any, wait_for: Callable[..., Any], number: signal.Signals, to: str, code: int
) -> None:
    with job.log(0).open("wb") as log:
        command = job.command("--devices", 2, *LONG_FIT)
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
    with process:
        host = socket.gethostname()
        wait_for("steps of both", lambda: {event["rank"] for event in job.events(host)[6:]} == {0, 1}, RUN_S)
        started = psutil.Process(process.pid).children(recursive=True)
        actors = [each for each in started if "ray::RayActor" in " ".join(each.cmdline())]
        assert len(actors) == 2
        (process if to == "the program" else actors[1]).send_signal(number)
        assert process.wait(SOON_S) == code
    assert saved(job) == ["stopped.ckpt"]
    assert psutil.wait_procs(started, timeout=SOON_S)[1] == []


FAULTY = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import OnExceptionCheckpoint

class Faulty(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            if sys.argv[2] == "raises":
                raise ValueError("of rank 1")
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        time.sleep(2)  # longer than it takes to kill an actor

trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp_ray", max_epochs=1, logger=False, enable_progress_bar=False,
    callbacks=[OnExceptionCheckpoint(sys.argv[1])], default_root_dir=sys.argv[1], stall_timeout_s=3,
)
trainer.fit(Faulty(), DataLoader(torch.ones(16, 1)))
"""


def faulty(variables: dict[str, str], folder: Path, how: str) -> str:
    """What a fit writes in which rank 1 fails or stops in its third batch."""
    program = folder / "program.py"
    program.write_text(FAULTY)
    done = subprocess.run(
        [sys.executable, program, folder, how], env={**variables, "DRIVETRAIN_STOPPED_TIMEOUT_S": "2"},
        stderr=subprocess.PIPE, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_t57_a_fit_whose_rank_fails_says_where_all_were_and_may_save(variables: dict[str, str], tmp_path: Path) -> None:
    text = faulty(variables, tmp_path, "raises")
    assert "Rank 1 was in the phase 'forward', after 3 batches had begun, in step 2" in text
    assert "Rank 0 was in " in text
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 2


def test_t31_a_job_that_hangs_is_ended_and_says_which_rank_is_missing(
    variables: dict[str, str], tmp_path: Path
) -> None:
    text = faulty(variables, tmp_path, "stops")
    assert "(state T), in the phase 'forward', after 3 batches had begun, in step 2." in text
    assert "Missing: rank 1.\nThe job is ended, because no rank can continue." in text
    assert [path.name for path in tmp_path.glob("stalled-*")]


# ---- devices, machines -----------------------------------------------------------------------------------------------


def test_processes_of_a_machine_see_all_that_ray_has_reserved_and_each_finds_its_own_at_its_local_rank(
    found: dict[str, Any],
) -> None:
    (visible, [first]), (visible_to_second, [second]) = found["devices"]
    assert visible == visible_to_second == [first, second]
    assert first != second
    assert {first, second} < {"0", "1", "2", "3"}  # and not 9, which is the launching process's


@pytest.fixture(scope="module")
def cluster_of_two(
    network: Any, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory, wait_for: Callable[..., Any]
) -> Iterator[tuple[Any, Any, dict[str, str]]]:
    """Two machines on which Ray runs, and the variables with which a program finds it."""
    folder = tmp_path_factory.mktemp("logs")
    own = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    options = ["--num-cpus=1", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats", "--block"]
    with network(2) as nodes:  # so that no later program finds a cluster that still runs
        address, started = f"{nodes[0].address}:{PORT}", "Ray runtime started"
        head = [RAY, "start", "--head", f"--port={PORT}", "--include-dashboard=false", *options]
        join = [RAY, "start", f"--address={address}", *options]
        for node, command in ((nodes[0], head), (nodes[1], join)):
            log = folder / f"{node.name}.log"
            node.start(*command, f"--node-ip-address={node.address}", output=log, NODES_OWN=node.name, **own)
            wait_for(f"Ray on {node.name}", lambda log=log: started in log.read_text())
        yield nodes[0], nodes[1], {"RAY_ADDRESS": address, **own}


def test_two_machines(cluster_of_two: Any, fitted: dict[str, Any], tmp_path: Path) -> None:
    """From whichever of them the program runs: rank 0 is there."""
    first, second, own = cluster_of_two
    common = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MINE": "here"}
    for here, there, connected in ((first, second, []), (second, first, [second.address])):
        path = tmp_path / f"{here.name}.pt"
        here.expect(sys.executable, PROGRAM, path, "two", *connected, seconds=RUN_S, **own)
        found = found_in(path)
        main = {**common, "MASTER_ADDR": here.address, "RANK": "0", "NODE_RANK": "0", "NODES_OWN": "here"}
        other = {**common, "MASTER_ADDR": here.address, "RANK": "1", "NODE_RANK": "1", "NODES_OWN": there.name}
        assert found["places"] == [[here.name, main], [there.name, other]]
        assert (found["world_size"], found["step"]) == (2, 10)
        assert torch.equal(found["weights"], fitted["spawn"]["weights"])


def test_t32_a_fit_on_two_machines_that_is_asked_to_end_saves_once(
    cluster_of_two: Any, job: Any, wait_for: Callable[..., Any]
) -> None:
    first, second, own = cluster_of_two
    command = job.command("--devices", 1, "--num-nodes", 2, *LONG_FIT)
    process = first.start(*command, output=job.log(0), **own)
    wait_for("steps of both", lambda: job.events(first.name)[3:] and job.events(second.name)[3:], RUN_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON_S) == 143
    assert saved(job) == ["stopped.ckpt"]
