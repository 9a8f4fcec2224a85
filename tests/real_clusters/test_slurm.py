"""SLURM: a controller and two nodes, each a machine of its own as far as the network can tell."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import command

if not os.environ.get("DRIVETRAIN_REAL_CLUSTERS"):
    pytest.skip("needs real cluster managers: run make test-clusters", allow_module_level=True)

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
TWO_TASKS = ("--nodes=1", "--ntasks-per-node=2")


def shape(options: tuple[str, ...]) -> list[Any]:
    """The arguments of train.py that go with them."""
    return ["--num-nodes", 2] if options is TWO_NODES else ["--devices", 2]


@pytest.mark.parametrize(
    ("options", "places"),
    [(TWO_NODES, [("n1", 0, 0), ("n2", 0, 1)]), (TWO_TASKS, [("n1", 0, 0), ("n1", 1, 0)])],
    ids=["two nodes", "two tasks on one node"],
)
def test_srun(slurm: Any, job: Any, alone: Callable[..., list[float]], options: Any, places: Any) -> None:
    slurm.expect("srun", *options, *job.command(*shape(options)))
    found = job.facts()
    assert [(facts["host"], facts["local_rank"], facts["node_rank"]) for facts in found] == places
    for rank, facts in enumerate(found):
        assert facts["environment"] == "SLURMEnvironment"
        assert "because SLURM has set SLURM_NTASKS" in facts["plan"]
        assert (facts["world_size"], facts["global_rank"], facts["step"]) == (2, rank, 12)
        assert facts["weights"] == pytest.approx(alone(), rel=1e-12)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["weights"] != pytest.approx(alone("--batch-size", "6"), rel=1e-3)


def test_sbatch(slurm: Any, job: Any, alone: Callable[..., list[float]]) -> None:
    number = slurm.submit(job, TWO_NODES, "srun", *job.command("--num-nodes", 2))
    assert slurm.wait(number)["JobState"] == "COMPLETED"
    assert [facts["host"] for facts in job.facts()] == ["n1", "n2"]
    assert all(facts["weights"] == pytest.approx(alone(), rel=1e-12) for facts in job.facts())


def test_the_demo(slurm: Any, digits_demo: Callable[..., None]) -> None:
    digits_demo(slurm, "srun", *TWO_TASKS, sys.executable)


def test_a_main_address_that_nobody_knows_is_said_before_the_processes_wait_for_each_other(
    slurm: Any, job: Any
) -> None:
    code, text = slurm.run("srun", *TWO_NODES, *job.command("--num-nodes", 2), MASTER_ADDR="nowhere.invalid")
    assert code != 0
    assert "the processes meet on 'nowhere.invalid', but this machine cannot find it" in text
    assert "Set MASTER_ADDR to a name or number that every machine of the job reaches." in text


# ---- programs that nobody started as tasks ---------------------------------------------------------------------------


def starts_its_own(job: Any) -> None:
    """Whether a program has trained with two processes of its own, of which SLURM knew nothing."""
    [first] = job.facts()[:1]
    assert first["environment"] == "LocalEnvironment"
    assert first["world_size"] == 2
    assert job.starts("n1")[0]["world_size"] == 2


@pytest.mark.parametrize("launcher", ["salloc", "srun --pty"])
def test_a_shell_in_a_job_is_as_any_other(slurm: Any, job: Any, launcher: str) -> None:
    shell = ["bash", "-c", shlex.join(job.command("--devices", 2))]
    if launcher == "salloc":
        slurm.expect("salloc", *TWO_TASKS, *shell)
    else:
        command = shlex.join(["srun", "--pty", "--nodes=1", "--cpus-per-task=2", *shell])
        slurm.expect("script", "--quiet", "--return", "--command", command, "/dev/null")  # it wants a terminal
    starts_its_own(job)


def test_a_job_that_asks_for_no_tasks_is_as_any_other(slurm: Any, job: Any) -> None:
    number = slurm.submit(job, ["--nodes=1", "--cpus-per-task=2"], *job.command("--devices", 2))
    assert slurm.wait(number)["JobState"] == "COMPLETED"
    starts_its_own(job)


def test_one_program_in_a_job_of_two_tasks_is_told_to_use_srun(slurm: Any, job: Any) -> None:
    number = slurm.submit(job, TWO_TASKS, *job.command("--devices", 2))
    assert slurm.wait(number)["JobState"] == "FAILED"
    assert "SLURM_NTASKS=2, but this process was not started by srun" in (job.folder / "job.log").read_text()


# ---- back into the queue ---------------------------------------------------------------------------------------------

EPOCHS = 25
STEPS = 4 * EPOCHS
LONG = ("--num-nodes", 2, "--epochs", EPOCHS, "--dropout", 0.5)


@pytest.fixture(scope="module")
def undisturbed(slurm: Any, new_job: Callable[[], Any]) -> list[float]:
    """The weights of the long job that nothing happens to."""
    job = new_job()
    slurm.expect("srun", *TWO_NODES, *job.command(*LONG))
    found: list[float] = job.facts()[0]["weights"]
    return found


def disturb(slurm: Any, job: Any, wait_for: Callable[..., Any], *options: Any, array: bool = False) -> str:
    """Submit the long job, and tell it in the middle that its time is over; its number."""
    parts = [*TWO_NODES, *(["--array=7"] if array else [])]
    number = slurm.submit(job, parts, "srun", *job.command(*LONG, "--pause", 0.2, *options)) + "_7" * array
    for host in ("n1", "n2"):
        wait_for(f"steps on {host}", lambda host=host: job.events(host)[5:])
    slurm.expect("scancel", "--signal=USR1", number)
    return str(number)


@pytest.mark.daemon
@pytest.mark.parametrize("array", [False, True], ids=["job", "element of an array"])
def test_t33_a_job_goes_back_into_the_queue_and_on_from_where_it_was(
    slurm: Any, job: Any, wait_for: Callable[..., Any], undisturbed: list[float], array: bool
) -> None:
    number = disturb(slurm, job, wait_for, array=array)
    wait_for("the second start", lambda: len(job.starts("n1")) == len(job.starts("n2")) == 2)
    job.hurry()
    ended = slurm.wait(number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    for host in ("n1", "n2"):
        first, second = job.starts(host)
        assert 0 == first["step"] < 5 <= second["step"] < STEPS
        assert [event["step"] for event in job.events(host) if event["event"] == "step"] == list(range(1, STEPS + 1))
    assert (job.folder / "hpc_ckpt_1.ckpt").exists()
    assert [facts["weights"] for facts in job.facts()] == [undisturbed, undisturbed]  # to the last bit


@pytest.mark.daemon
def test_the_file_that_recipe_prints_is_queued_again_and_resumes(
    slurm: Any, job: Any, wait_for: Callable[..., Any], undisturbed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    _, program, *words = job.command(*LONG, "--pause", 0.2, "--slow-save", 0.01)
    options = ["--cpu", "--nodes=2", "--time=5", "--stop-timeout=60", "--name=digits", f"--folder={job.folder}"]
    assert command.main(["recipe", "slurm", program, *options, "--", *words]) == 0
    script = job.folder / "job.sh"
    script.write_text(capsys.readouterr().out)
    path = f"{Path(sys.executable).parent}:{slurm.expect('sh', '-c', 'echo $PATH').strip()}"  # whose python it is
    number = slurm.expect("sbatch", "--parsable", "--chdir", job.folder, script, PATH=path).strip()
    for host in ("n1", "n2"):
        wait_for(f"steps on {host}", lambda host=host: job.events(host)[5:])
    assert slurm.show(number)["JobName"] == "digits"
    slurm.expect("scancel", "--signal=USR1", number)  # as SLURM does 60 s before the end, by the file's --signal
    wait_for("the second start", lambda: len(job.starts("n1")) == len(job.starts("n2")) == 2)
    job.hurry()
    ended = slurm.wait(number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    for host in ("n1", "n2"):
        assert [event["step"] for event in job.events(host) if event["event"] == "step"] == list(range(1, STEPS + 1))
    assert [facts["weights"] for facts in job.facts()] == [undisturbed, undisturbed]
    assert "Resuming from" in (job.folder / f"digits-{number}.log").read_text()


@pytest.mark.daemon
def test_t33_without_auto_requeue_the_signal_ends_the_job(slurm: Any, job: Any, wait_for: Callable[..., Any]) -> None:
    """So it is the Trainer that puts a job back, and not SLURM."""
    ended = slurm.wait(disturb(slurm, job, wait_for, "--no-requeue"))
    assert (ended["JobState"], ended["Restarts"]) == ("FAILED", "0")
    assert len(job.starts("n1")) == 1
    assert not list(job.folder.glob("hpc_ckpt_*"))
