"""Clusters that start the program once on each machine, from the variables that their documents show.

None of these clusters could be had here: each recording below is the example of the page that the environment names, or
follows its table. The last test starts two such "machines" on this one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clusters.test_environment import CONDOR, LSF, SLURM, TORCHRUN

from drivetrain.accelerators import Accelerator
from drivetrain.clusters import detect
from drivetrain.clusters._machines import MachinesEnvironment
from drivetrain.clusters.local import LocalEnvironment, free_port
from drivetrain.errors import ConfigurationError
from drivetrain.plan import Machine, Plan, resolve
from drivetrain.settings import Settings

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31-563597_myclus_1",
}  # fmt: skip
DSTACK = {
    "DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_GPUS_PER_NODE": "4", "DSTACK_GPUS_NUM": "8",
    "DSTACK_MASTER_NODE_IP": "10.128.0.47", "DSTACK_NODES_IPS": "10.128.0.47\n10.128.0.48",
}  # fmt: skip
AWS_BATCH = {
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0", "AWS_BATCH_JOB_NODE_INDEX": "9", "AWS_BATCH_JOB_NUM_NODES": "10",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "172.31.0.5",
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "1"}
SPEC: dict[str, Any] = {
    "cluster": {
        "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
        "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
        "workerpool2": ["cmle-training-workerpool2-ab-0:2222", "cmle-training-workerpool2-ab-1:2222"],
    },
    "environment": "cloud", "task": {"type": "workerpool1", "index": 1, "trial": "TRIAL_ID"},
}  # fmt: skip
VERTEX = {"CLUSTER_SPEC": json.dumps(SPEC)}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "DRIVETRAIN_JOB_NODES": "3", "MASTER_ADDR": "train-0.train"}
AZURE = {  # PyTorchConfiguration(process_count=8, node_count=2): Azure ML itself starts each process
    "AZUREML_RUN_ID": "x", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "WORLD_SIZE": "8", "NODE_RANK": "1",
    "RANK": "5", "LOCAL_RANK": "1",
}  # fmt: skip
TRAINJOB = {  # Kubeflow Trainer v2 sets PET_* for torchrun, which sets its own variables in each process
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1", **TORCHRUN,
}  # fmt: skip

# variables, class, machines, this machine, devices, address, port
RECORDED: dict[str, tuple[dict[str, str], str, tuple[int, int, int | None], str, int]] = {
    "SkyPilot": (SKYPILOT, "SkyPilotEnvironment", (2, 1, 4), "10.0.0.1", 12910),
    "dstack": (DSTACK, "DstackEnvironment", (2, 1, 4), "10.128.0.47", 12910),
    "AWS Batch": (AWS_BATCH, "AWSBatchEnvironment", (10, 9, None), "172.31.0.5", 12910),
    "SageMaker": (SAGEMAKER, "SageMakerEnvironment", (2, 1, 1), "algo-1", 12910),
    "Vertex AI": (VERTEX, "VertexEnvironment", (3, 2, None), "cmle-training-workerpool0-ab-0", 2222),
    "Kubernetes": (KUBERNETES, "KubernetesEnvironment", (3, 2, None), "train-0.train", 12910),
}


@pytest.mark.parametrize(("variables", "cls", "numbers", "address", "port"), RECORDED.values(), ids=RECORDED)
def test_recorded_variables(
    variables: dict[str, str], cls: str, numbers: tuple[int, int, int | None], address: str, port: int
) -> None:
    environment, why = detect(dict(variables))
    assert type(environment).__name__ == cls
    assert isinstance(environment, MachinesEnvironment)
    assert why == environment.evidence
    assert (environment.num_nodes(), environment.node_rank(), environment.reserved_devices()) == numbers
    assert (environment.main_address, environment.main_port) == (address, port)
    assert not environment.creates_processes_externally
    given = type(environment)({**variables, "MASTER_ADDR": "chosen", "MASTER_PORT": "4321"})
    assert (given.main_address, given.main_port) == ("chosen", 4321)


@pytest.mark.parametrize(("variables", "cls"), [each[:2] for each in RECORDED.values()], ids=RECORDED)
@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (TORCHRUN, "TorchElasticEnvironment"), (SLURM, "SLURMEnvironment"), (LSF, "LSFEnvironment"),
        (CONDOR, "HTCondorEnvironment"),
    ],
)  # fmt: skip
def test_launchers_that_start_each_process_take_precedence(
    variables: dict[str, str], cls: str, other: dict[str, str], expected: str
) -> None:
    assert type(detect({"PATH": "", **variables, **other})[0]).__name__ == expected


@pytest.mark.parametrize(
    "variables",
    [
        {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"},
        {**DSTACK, "DSTACK_NODES_NUM": "1"},
        {**AWS_BATCH, "AWS_BATCH_JOB_NUM_NODES": "1"},
        {"AWS_BATCH_JOB_ID": "x", "AWS_BATCH_JOB_ARRAY_INDEX": "3"},
        {**SAGEMAKER, "SM_HOSTS": '["algo-1"]'},
        {**SAGEMAKER, "SM_HOSTS": "algo-1"},
        {"CLUSTER_SPEC": json.dumps({**SPEC, "cluster": {"workerpool0": ["a:2222"]}})},
        {"CLUSTER_SPEC": "{}"},
        {"CLUSTER_SPEC": "of another program"},
        {"CLUSTER_SPEC": '{"cluster": ["a", "b"], "task": {}}'},
        {"JOB_COMPLETION_INDEX": "3"},  # an indexed Job whose pods have nothing to do with each other
        {**KUBERNETES, "DRIVETRAIN_JOB_NODES": "1"},
        {name: "" for name in (*SKYPILOT, *DSTACK, *AWS_BATCH, *SAGEMAKER, *VERTEX, *KUBERNETES)},
    ],
)
def test_one_machine_is_not_such_a_cluster(variables: dict[str, str]) -> None:
    assert type(detect({"PATH": "", **variables})[0]).__name__ == "LocalEnvironment"


PARTS = [
    (variables, missing)
    for variables in (SKYPILOT, DSTACK, AWS_BATCH, SAGEMAKER, KUBERNETES)
    for missing in detect(dict(variables))[0].variables
]


@pytest.mark.parametrize(("variables", "missing"), PARTS, ids=[missing for _, missing in PARTS])
def test_a_variable_that_is_missing_is_named(variables: dict[str, str], missing: str) -> None:
    names = detect(dict(variables))[0].variables
    for value in ({}, {missing: ""}):
        with pytest.warns(UserWarning, match=f" set, but not {missing}: ") as told:
            found, _ = detect({**{name: variables[name] for name in names if name != missing}, **value})
        assert type(found).__name__ == "LocalEnvironment"
        [message] = [str(each.message) for each in told]
        assert f"Set {missing} as the cluster does" in message


@pytest.mark.parametrize(
    "variables",
    [
        {"JOB_COMPLETION_INDEX": "3"}, {"MASTER_ADDR": "a"},
        {**DSTACK, "DSTACK_NODES_NUM": "1", "DSTACK_MASTER_NODE_IP": ""},
        {"SKYPILOT_NODE_IPS": "10.0.0.1"}, {"SKYPILOT_NODE_RANK": "1", **TORCHRUN},
        {"SKYPILOT_NODE_RANK": "1", "LOCAL_RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_variables_that_are_no_part_of_a_cluster_are_left_alone(
    variables: dict[str, str], recwarn: pytest.WarningsRecorder
) -> None:
    detect({"PATH": "", **variables})
    assert [str(each.message) for each in recwarn] == []


def test_ranks_that_a_process_would_not_use_are_told() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # of a PyTorchJob
    with pytest.warns(UserWarning, match=r"RANK=0 and WORLD_SIZE=2 are set, but not LOCAL_RANK: .*KubeflowEnvironment"):
        assert type(detect(variables)[0]).__name__ == "LocalEnvironment"


def test_a_cluster_that_was_passed_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    for name, text in {"SKYPILOT_NODE_RANK": "1", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)
    resolve(Settings(accelerator="cpu", plugins=[LocalEnvironment()]))
    assert [str(each.message) for each in recwarn if "are set" in str(each.message)] == []


def test_azure_ml_starts_each_process_and_needs_no_environment_of_its_own() -> None:
    environment, _ = detect(dict(AZURE))
    assert type(environment).__name__ == "LocalEnvironment"
    assert environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (8, 5, 1)
    assert (environment.node_rank(), environment.main_address, environment.main_port) == (1, "10.0.0.4", 6105)
    environment.validate_settings(4, 2)


def test_a_trainjob_of_kubeflow_starts_torchrun() -> None:
    environment, _ = detect(dict(TRAINJOB))
    assert type(environment).__name__ == "TorchElasticEnvironment"
    assert (environment.world_size(), environment.global_rank()) == (8, 5)


def test_a_cluster_of_this_kind_must_know_its_number_of_machines() -> None:
    with pytest.raises(TypeError, match="num_nodes"):
        MachinesEnvironment({})  # type: ignore[abstract]  # which is tested


def test_the_main_node_of_aws_batch_is_the_first_whatever_its_index() -> None:
    def node(index: int) -> MachinesEnvironment:
        found, _ = detect({**AWS_BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "3", "AWS_BATCH_JOB_NODE_INDEX": str(index)})
        assert isinstance(found, MachinesEnvironment)
        return found

    assert [node(index).node_rank() for index in range(10)] == [7, 8, 9, 0, 1, 2, 3, 4, 5, 6]
    unset = {name: text for name, text in AWS_BATCH.items() if "ADDRESS" not in name}
    assert detect({**unset, "AWS_BATCH_JOB_NODE_INDEX": "0"})[0].main_address == "127.0.0.1"  # the main node itself
    with pytest.raises(
        ConfigurationError, match="INDEX=9 is not the main node, but AWS_BATCH_.*ADDRESS, where it meet"
    ):
        detect(unset)[0].validate_address()  # at once


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"},
            "SM_CURRENT_HOST='algo-3' is not one of SM_HOSTS, .* algo-1, algo-2",
        ),
        (
            {"CLUSTER_SPEC": json.dumps({**SPEC, "task": {"type": "workerpool2", "index": 0}})},
            "is in 'workerpool2', but",
        ),
        (
            {"CLUSTER_SPEC": json.dumps({**SPEC, "task": {"type": "workerpool0", "index": 1}})},
            "this is replica 1 of workerpool0, which has 1. Replicas are numbered from 0",
        ),
        ({"CLUSTER_SPEC": json.dumps({**SPEC, "task": {"type": "workerpool1", "index": "x"}})}, "replica 'x' of"),
        ({**DSTACK, "DSTACK_NODE_RANK": "2"}, "this machine is number 2 of 2. Machines are numbered from 0"),
        ({**AWS_BATCH, "AWS_BATCH_JOB_NODE_INDEX": "12"}, "this machine is number 12 of 2"),
        ({**AWS_BATCH, "AWS_BATCH_JOB_NODE_INDEX": "-1"}, "this machine is number -1 of 2"),
        ({**DSTACK, "DSTACK_NODES_NUM": "two"}, "DSTACK_NODES_NUM, which holds 'two', which is no whole number"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_RANK, which holds 'x'"),
    ],
)
def test_variables_that_contradict_each_other(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        detect(dict(variables))[0].validate_settings(1, 2)


# ---- the plan --------------------------------------------------------------------------------------------------------


class Four(Accelerator):
    """A kind of device, of which this machine has four."""

    name = "four"
    autocast_device_type = "meta"

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        return [torch.device("meta", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def plan(variables: dict[str, str], **arguments: Any) -> Plan:
    machine = Machine(environment=detect(dict(variables)), has_tensorboard=False)
    return resolve(Settings(**{"accelerator": Four(), **arguments}), machine)


@pytest.mark.parametrize(("given", "devices"), [({}, 4), ({"num_nodes": 2}, 4), ({"devices": 2}, 2)])
def test_machines_and_devices_come_from_the_cluster(given: dict[str, Any], devices: int) -> None:
    found = plan(SKYPILOT, **given)
    assert (found.num_nodes, len(found.devices), found.start_method) == (2, devices, "popen")
    assert f"{devices} on each of 2 machines, started by popen  because SkyPilot has set" in str(found)


def test_fewer_devices_are_reserved_than_the_machine_has() -> None:
    found = plan({**DSTACK, "DSTACK_GPUS_PER_NODE": "3"})
    assert len(found.devices) == 3
    assert 'because devices="auto", and the cluster has reserved 3' in str(found)


def test_on_the_processors_the_number_of_gpus_does_not_count() -> None:
    assert len(plan(SKYPILOT, accelerator="cpu", devices=5).devices) == 5
    assert len(plan({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}).devices) == 4


@pytest.mark.parametrize(
    ("variables", "given", "said"),
    [
        (
            SKYPILOT,
            {"num_nodes": 3},
            "num_nodes=3, but SkyPilotEnvironment says that the job has 2 machines. Leave num",
        ),
        (
            DSTACK,
            {"devices": 4, "num_nodes": 1, "limit": "3"},
            "devices=4 means 4 devices, but the cluster .* 3 are res",
        ),
        (
            SKYPILOT,
            {"limit": "8"},
            "cluster says that 8 devices are reserved on each machine, but this one shows 4. Wr",
        ),
    ],
)
def test_what_contradicts_the_cluster(variables: dict[str, str], given: dict[str, Any], said: str) -> None:
    limit = given.pop("limit", None)
    limited = {name: limit for name in variables if "GPUS_PER_NODE" in name} if limit else {}
    with pytest.raises(ConfigurationError, match=said):
        plan({**variables, **limited}, **given)


# ---- the address -----------------------------------------------------------------------------------------------------


def test_a_name_that_the_cluster_makes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def later(host: str, port: object) -> list[Any]:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", later)
    environment, _ = detect(dict(KUBERNETES))
    environment.validate_address()
    assert asked == ["train-0.train"] * 3
    asked.clear()
    environment.address_timeout_s = 0.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="meet on 'train-0.train', but this machine cannot find it"):
        environment.validate_address()


# ---- two machines on this one ----------------------------------------------------------------------------------------

LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"
PROGRAM = """
import sys, torch
from pathlib import Path
from torch.utils.data import DataLoader
from drivetrain import LightningModule, Trainer, seed_everything

class Summing(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = []
    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return (self.weight * batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", devices=int(sys.argv[2]), max_epochs=1, logger=False,
                      enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    model = Summing()
    trainer.fit(model, DataLoader(torch.arange(8.0)))
    ranks = [trainer.num_nodes, trainer.world_size, trainer.node_rank, trainer.local_rank]
    facts = [*ranks, model.seen, float(model.weight)]
    Path(sys.argv[1], f"rank{trainer.global_rank}").write_text(repr(facts))
"""


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.skipif(not LONG, reason="one more run"))])
def test_the_same_command_on_each_machine_is_enough(tmp_path: Path, devices: int) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "train.py", str(tmp_path), str(devices)],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": str(rank),
                 "SKYPILOT_NUM_GPUS_PER_NODE": "0", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in started:
        text, _ = process.communicate(timeout=150)
        assert process.returncode == 0, text
    size = 2 * devices
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(size)]
    weight = found[0].rpartition(", ")[2][:-1]
    assert found == [
        f"[2, {size}, {rank // devices}, {rank % devices}, {[float(each) for each in range(rank, 8, size)]}, {weight}]"
        for rank in range(size)
    ]
    assert float(weight) == pytest.approx(1 - 0.1 * sum(range(8)) / size)
