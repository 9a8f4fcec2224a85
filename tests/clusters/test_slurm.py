"""SLURM: tasks of srun, and the traps of jobs that are started otherwise."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from drivetrain.clusters import SLURMEnvironment, detect
from drivetrain.errors import ConfigurationError

TASK = {
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_JOB_ID": "7012345", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "PATH": "",
    "SLURM_NODELIST": "n[1-2]",
}  # fmt: skip


def task(**changes: str | None) -> SLURMEnvironment:
    """The task above with other values; ``None`` for a variable that is not set."""
    variables = {**TASK, **changes}
    return SLURMEnvironment(environ={name: value for name, value in variables.items() if value is not None})


def test_c10_a_task() -> None:
    environment = task()
    assert environment.creates_processes_externally
    numbers = [
        environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank(),
        environment.main_port,
    ]  # fmt: skip
    assert numbers == [4, 3, 1, 1, 17345]
    assert all(type(number) is int for number in numbers)
    assert environment.main_address == "n1"
    environment.validate_settings(2, 2)


# ---- where the processes meet ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"), ("gpu-01", "gpu-01"), ("n1,n2", "n1"), ("n1 n2", "n1"), ("n[1-2]", "n1"), ("n[07-12,20]", "n07"),
        ("n[3,5-7],m1", "n3"), ("m1,n[3,5-7]", "m1"), ("rack[1-2]node[08-10]", "rack1node08"), ("n[1-2]-ib", "n1-ib"),
        ("gpu-a[1-2]", "gpu-a1"), ("n[4]", "n4"), ("10.0.0.[5-6]", "10.0.0.5"), (" n1 ", "n1"),
        ("c[01-03],n[1-2],x", "c01"),
    ],
)  # fmt: skip
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert SLURMEnvironment.resolve_root_node_address(nodes) == first


def test_a_steps_nodes_come_before_the_jobs() -> None:
    assert task(SLURM_STEP_NODELIST="n2").main_address == "n2"
    assert task(SLURM_NODELIST=None, SLURM_JOB_NODELIST="m[4-5]").main_address == "m4"
    assert task(SLURM_NODELIST=None).main_address == "127.0.0.1"


def test_given_address_and_port_win() -> None:
    environment = task(MASTER_ADDR="chosen", MASTER_PORT="4321")
    assert (environment.main_address, environment.main_port) == ("chosen", 4321)


@pytest.mark.parametrize(
    ("job", "port"), [("7012345", 17345), ("7", 15007), ("120000", 15000), ("9999", 24999), ("19999", 24999)]
)
def test_s3_12_the_port_is_made_of_the_jobs_number(job: str, port: int) -> None:
    assert task(SLURM_JOB_ID=job).main_port == port


def test_s3_12_steps_side_by_side_do_not_collide() -> None:
    ports = [task(SLURM_STEP_ID=str(step)).main_port for step in range(100)]
    assert len(set(ports)) == 100
    assert all(15_000 <= port < 25_000 for port in ports)
    neighbours = [task(SLURM_JOB_ID=str(7012345 + job)).main_port for job in range(1, 100)]
    assert set(neighbours).isdisjoint(ports[:4])


# ---- detection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True), ({"SLURM_JOB_NAME": "bash"}, False), ({"SLURM_JOB_NAME": "interactive"}, False),
        ({"SLURM_JOB_NAME": "bash-job"}, True),
    ],
)  # fmt: skip
def test_interactive_jobs_are_started_by_hand(changes: dict[str, str], found: bool) -> None:
    allocation = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}
    assert SLURMEnvironment.detect({**allocation, **changes}) is found


def test_nothing_without_tasks() -> None:
    assert not SLURMEnvironment.detect({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "PATH": ""})


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A folder that holds an ``srun``."""
    (tmp_path / "srun").write_text("")
    (tmp_path / "srun").chmod(0o755)
    return str(tmp_path)


def test_srun_at_hand_but_not_used_is_said(path: str) -> None:
    with pytest.warns(UserWarning, match=r"has SLURM's srun, but .* start it with: srun python"):
        assert not SLURMEnvironment.detect({"PATH": path})
    assert SLURMEnvironment.detect({**TASK, "PATH": path})  # used: no warning, which would be an error here
    assert not SLURMEnvironment.detect({"PATH": ""})
    assert not SLURMEnvironment.detect({"PATH": path, "LOCAL_RANK": "0"})  # somebody else has started it


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_tasks_in_a_job_that_is_taken_for_a_shell_are_alone(name: str) -> None:
    shell = {**TASK, "SLURM_JOB_NAME": name}
    with pytest.warns(UserWarning, match=f"srun has started 4 tasks, but in a job called '{name}'.*--job-name=train"):
        assert not SLURMEnvironment.detect(shell)
    assert not SLURMEnvironment.detect({**shell, "SLURM_PTY_PORT": "4000"})  # a shell indeed: no warning
    assert not SLURMEnvironment.detect({**shell, "SLURM_NTASKS": "1"})


def test_mpirun_in_a_job_starts_no_tasks() -> None:
    assert not SLURMEnvironment.detect({**TASK, "OMPI_COMM_WORLD_RANK": "0"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "SkyPilotEnvironment"),
        ({"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}, "LocalEnvironment"),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "5"}, "SLURMEnvironment"),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "1"}, "SLURMEnvironment"),
        ({"SKYPILOT_NODE_IPS": ""}, "SLURMEnvironment"),
    ],
    ids=["two machines", "one machine", "srun in its task", "srun, the same rank", "no SkyPilot"],
)  # fmt: skip
def test_skypilot_on_a_cluster_of_slurm_starts_the_program_once_on_each_machine(
    changes: dict[str, str], expected: str
) -> None:
    """Its executor runs by srun, one task on each machine: sky/skylet/executor/slurm.py."""
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
    step = {**TASK, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    variables = {**step, **sky, **changes}
    variables["SLURM_NTASKS"] = changes.get("SLURM_NTASKS", str(len(variables["SKYPILOT_NODE_IPS"].split()) or 2))
    if expected == "LocalEnvironment":
        variables["SLURM_PROCID"] = "0"
    found, _ = detect(variables)
    assert type(found).__name__ == expected
    if expected == "SkyPilotEnvironment":
        assert (found.nodes_meant(1), found.node_rank(), found.reserved_devices()) == (2, 1, 4)
        assert not found.creates_processes_externally


# ---- what the user asked for -----------------------------------------------------------------------------------------


def test_ntasks_without_ntasks_per_node_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"SLURM_NTASKS=4, but .*Write #SBATCH --ntasks-per-node=2 in place"):
        task(SLURM_NTASKS_PER_NODE=None).validate_settings(2, 2)
    task(SLURM_NTASKS_PER_NODE=None, SLURM_NTASKS="1", SLURM_NNODES="1", SLURM_PROCID="0").validate_settings(1, 1)


@pytest.mark.parametrize(
    ("devices", "nodes", "message"),
    [
        (3, 2, "SLURM_NTASKS_PER_NODE=2, but devices=3. Write devices=2"),
        (2, 1, "SLURM_NNODES=2, but num_nodes=1. Write num_nodes=2"),
    ],
)
def test_devices_and_nodes_must_be_the_jobs(devices: int, nodes: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        task().validate_settings(devices, nodes)


def test_the_product_must_be_the_number_of_tasks() -> None:
    with pytest.raises(ConfigurationError, match="3 processes were started, but devices=2 and num_nodes=2 make 4"):
        task(SLURM_NTASKS="3").validate_settings(2, 2)


def test_one_process_of_several_that_srun_did_not_start_would_wait_for_ever() -> None:
    with pytest.raises(ConfigurationError, match=r"SLURM_NTASKS=4, but this process was not started by srun"):
        task(SLURM_STEP_ID=None, SLURM_PROCID="0").validate_settings(2, 2)


# ---- the job ---------------------------------------------------------------------------------------------------------


def test_job() -> None:
    environment = task()
    assert (environment.job_name(), environment.job_id(), environment.requeue_id()) == ("train", 7012345, "7012345")
    assert environment.restart_count() == 0
    assert task(SLURM_RESTART_COUNT="2").restart_count() == 2


def test_the_element_of_an_array() -> None:
    environment = task(SLURM_ARRAY_JOB_ID="7012340", SLURM_ARRAY_TASK_ID="5")
    assert (environment.job_id(), environment.requeue_id()) == (7012345, "7012340_5")


@pytest.mark.parametrize("changes", [{"SLURM_JOB_NAME": "bash"}, {"SLURM_JOB_ID": None}])
def test_an_interactive_job_is_not_put_into_the_queue_again(changes: dict[str, str | None]) -> None:
    environment = task(**changes)
    assert environment.job_id() is environment.requeue_id() is None
    assert environment.main_port == 12910


def test_requeue_settings() -> None:
    assert (SLURMEnvironment().auto_requeue, SLURMEnvironment().requeue_signal) == (True, signal.SIGUSR1)
    environment = SLURMEnvironment(auto_requeue=False, requeue_signal=signal.SIGUSR2)
    assert (environment.auto_requeue, environment.requeue_signal) == (False, signal.SIGUSR2)
