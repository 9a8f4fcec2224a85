"""The contract of a cluster environment, its defaults, its names of the first generation, and what is detected."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer
from drivetrain.clusters import ClusterEnvironment, ClusterRegistry, LightningEnvironment, LocalEnvironment, detect
from drivetrain.errors import ConfigurationError
from drivetrain.plugins import environments

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "host", "MASTER_PORT": "29400", "WORLD_SIZE": "8", "RANK": "5",
    "LOCAL_RANK": "1", "GROUP_RANK": "2", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_JOB_ID": "7012345", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "PATH": "",
    "SLURM_NODELIST": "n[1-2]",
}  # fmt: skip
LSF = {
    "LSB_JOBID": "1234", "LSB_DJOB_RANKFILE": "/nowhere", "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_RANK": "3",
}  # fmt: skip
MPI = {"PMI_SIZE": "2"}  # which srun sets too, for those who use MPI in its tasks
CONDOR = {"_CONDOR_PROCNO": "1", "_CONDOR_NPROCS": "2"}


# ---- as it stands: torchrun's variables ------------------------------------------------------------------------------


def test_c10_everything_that_is_a_number_is_an_int() -> None:
    environment = ClusterEnvironment(dict(TORCHRUN))
    numbers = [
        environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank(),
        environment.main_port, environment.master_port(),  # type: ignore[attr-defined]
    ]  # fmt: skip
    assert numbers == [8, 5, 1, 2, 29400, 29400]
    assert all(type(number) is int for number in numbers)
    assert environment.main_address == environment.master_address() == "host"  # type: ignore[attr-defined]
    assert environment.creates_processes_externally is environment.creates_children() is True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "ask", "default"),
    [
        ("MASTER_ADDR", lambda environment: environment.main_address, "127.0.0.1"),
        ("MASTER_PORT", lambda environment: environment.main_port, 12910),
    ],
)
def test_s3_11_s3_12_unset_takes_a_default_and_says_so_once(name: str, ask: Any, default: Any) -> None:
    variables = {key: value for key, value in TORCHRUN.items() if key != name}
    environment = ClusterEnvironment(variables)
    with pytest.warns(UserWarning, match=f"{name} is not set; {default} is used"):
        assert ask(environment) == default
    assert variables[name] == str(default)
    assert ask(environment) == default  # and no second warning, which would be an error here


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_a_missing_variable_is_named_with_its_reader_and_a_cure(name: str) -> None:
    environment = ClusterEnvironment({key: value for key, value in TORCHRUN.items() if key != name})
    ask = {
        "WORLD_SIZE": environment.world_size, "RANK": environment.global_rank, "LOCAL_RANK": environment.local_rank,
    }[name]  # fmt: skip
    with pytest.raises(ConfigurationError, match=f"ClusterEnvironment reads .* {name}, which is not set. Start"):
        ask()


def test_on_one_machine_the_local_rank_is_the_rank_where_nothing_sets_it() -> None:
    environment = ClusterEnvironment({"WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    environment.validate_settings(2, 1)
    assert environment.global_rank() == 1
    environment.environ["RANK"] = "0"
    assert environment.global_rank() == 0
    del environment.environ["RANK"]
    with pytest.raises(ConfigurationError, match="RANK, which is not set"):
        environment.validate_settings(1, 2)  # the same object for a job of two machines


@pytest.mark.parametrize("rank", ["-1", "2"])
def test_a_rank_that_the_job_does_not_have_is_refused(rank: str) -> None:
    with pytest.raises(ConfigurationError, match=f"has the rank {rank}, but ranks of 2 processes are 0 to 1"):
        ClusterEnvironment(TORCHRUN | {"WORLD_SIZE": "2", "RANK": rank}).validate_settings(2, 1)


@pytest.mark.parametrize("text", ["", "two", "1.5", "0x2"])
def test_a_variable_that_is_no_number_is_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"RANK, which holds {text!r}, which is no whole number"):
        ClusterEnvironment(TORCHRUN | {"RANK": text}).global_rank()


def test_a_machine_is_number_0_where_nobody_counts_them() -> None:
    assert ClusterEnvironment({}).node_rank() == 0


def test_what_the_cluster_knows_cannot_be_set() -> None:
    environment = ClusterEnvironment(dict(TORCHRUN))
    environment.set_world_size(99)
    environment.set_global_rank(98)
    assert (environment.world_size(), environment.global_rank()) == (8, 5)


def test_validate_settings_compares_the_number_of_processes() -> None:
    environment = ClusterEnvironment(dict(TORCHRUN))
    environment.validate_settings(2, 4)
    with pytest.raises(ConfigurationError, match="8 processes were started, but devices=2 and num_nodes=3 make 6"):
        environment.validate_settings(2, 3)


def test_validate_address_finds_a_name_that_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, port: object) -> list[Any]:
        if host == "host":
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    ClusterEnvironment(TORCHRUN | {"MASTER_ADDR": "127.0.0.1"}).validate_address()
    with pytest.raises(ConfigurationError, match="meet on 'host', but this machine cannot find it: .*Set MASTER_ADDR"):
        ClusterEnvironment(dict(TORCHRUN)).validate_address()


def test_variables_of_the_process_are_read_where_the_object_is(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = pickle.loads(pickle.dumps(ClusterEnvironment()))
    assert environment.environ is os.environ
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert environment.local_rank() == 3
    given = pickle.loads(pickle.dumps(ClusterEnvironment(dict(TORCHRUN))))
    assert given.local_rank() == 1


# ---- classes of the first generation ---------------------------------------------------------------------------------


class OfTheFirstGeneration(ClusterEnvironment):
    """The four methods of document 3 (E3-2)."""

    def master_address(self) -> str:
        return "first"

    def master_port(self) -> str:
        return "1234"

    def world_size(self) -> int:
        return 2

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])


def test_s3_10_a_cluster_of_ones_own_with_the_methods_of_the_first_generation() -> None:
    environment = OfTheFirstGeneration()
    assert (environment.main_address, environment.main_port) == ("first", 1234)


def test_s3_11_names_follow_through_subclasses() -> None:
    class Newer(OfTheFirstGeneration):
        @property
        def main_address(self) -> str:
            return "newer"

    class Extended(Newer):
        def master_address(self) -> str:
            return super().master_address() + " and extended"

    assert Newer().master_address() == "newer"
    assert Extended().main_address == Extended().master_address() == "newer and extended"
    assert Extended().main_port == 1234


def test_creates_children_can_stand_for_the_property() -> None:
    class Starts(ClusterEnvironment):
        def creates_children(self) -> bool:
            return False

    environment = Starts()
    assert environment.creates_processes_externally is False
    environment.set_world_size(3)
    environment.set_global_rank(2)
    environment.environ = {}
    assert (environment.world_size(), environment.global_rank()) == (3, 2)


# ---- what a class of one's own answers -------------------------------------------------------------------------------


class AnswersInText(ClusterEnvironment):
    """What documents print: the variables as they are."""

    def __init__(self, **variables: str) -> None:
        super().__init__(dict(variables))

    def world_size(self) -> Any:
        return self.environ.get("MY_SIZE")

    def global_rank(self) -> Any:
        return self.environ.get("MY_RANK")

    def local_rank(self) -> Any:
        return self.environ["MY_LOCAL_RANK"]

    @staticmethod
    def node_rank() -> Any:  # type: ignore[override]
        return "0"

    @property
    def main_port(self) -> Any:
        return self.environ.get("MY_PORT")

    main_address = None  # type: ignore[assignment]


class OfAMixin:
    def world_size(self) -> str:
        return "4"

    def main_port(self) -> str:  # a method where a property belongs
        return "99"

    def creates_processes_externally(self) -> bool:
        return False


class Mixed(OfAMixin, ClusterEnvironment):  # type: ignore[misc]
    pass


def test_c10_what_a_class_of_ones_own_answers_in_text_is_a_number() -> None:
    environment: Any = AnswersInText(MY_SIZE="2", MY_RANK="1", MY_LOCAL_RANK=" 1 ", MY_PORT="1234")
    numbers = [
        environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank(),
        environment.main_port, environment.master_port(),
    ]  # fmt: skip
    assert numbers == [2, 1, 1, 0, 1234, 1234]
    assert {type(number) for number in numbers} == {int}
    environment.validate_settings(2, 1)
    mixed: Any = Mixed()
    assert (mixed.world_size(), mixed.main_port, mixed.creates_processes_externally) == (4, 99, False)
    assert (mixed.master_port(), mixed.creates_children()) == (99, False)


def test_c10_an_answer_of_none_names_the_method_and_its_variable() -> None:
    environment: Any = AnswersInText()
    asked = {
        "world_size()": environment.world_size, "global_rank()": environment.global_rank,
        "main_port": lambda: environment.main_port,
    }  # fmt: skip
    for (name, ask), variable in zip(asked.items(), ("MY_SIZE", "MY_RANK", "MY_PORT"), strict=True):
        expected = f"AnswersInText.{name} answered None; probably it reads {variable}, which is not set. Start"
        with pytest.raises(ConfigurationError, match=re.escape(expected)):
            ask()
    with pytest.raises(ConfigurationError, match=r"AnswersInText.main_address answered None; probably it reads a var"):
        _ = environment.main_address


class OfTheDocument(ClusterEnvironment):
    """The class of document 3 (E3-2), as it is printed there."""

    def master_address(self) -> Any:
        return os.environ["MASTER_ADDR"]

    def master_port(self) -> Any:
        return os.environ["MASTER_PORT"]

    def world_size(self) -> Any:
        return os.environ.get("WORLD_SIZE")

    def local_rank(self) -> Any:
        return int(os.environ["LOCAL_RANK"])


def fitted_with(devices: int | str) -> Any:
    trainer = Trainer(
        plugins=[OfTheDocument()], accelerator="cpu", devices=devices, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    seen: list[float] = []

    class Summing(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch.tolist())
            return (self.weight * batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer.fit(Summing(), DataLoader(torch.arange(4.0)))
    return trainer.world_size, trainer.global_rank, seen


@pytest.mark.parametrize("devices", [2, "auto"])
def test_e3_2_a_class_of_the_document_trains_on_two_ranks(pool: Any, devices: int | str) -> None:
    assert pool.run(fitted_with, devices, group=False) == [(2, 0, [0.0, 2.0]), (2, 1, [1.0, 3.0])]


def test_e3_2_without_its_variable_the_plan_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigurationError, match=r"OfTheDocument.world_size\(\) answered None; .* reads WORLD_SIZE"):
        Trainer(plugins=[OfTheDocument()], accelerator="cpu")


@pytest.mark.parametrize("answer", ["two", 1.5, [1], ""])
def test_c10_an_answer_that_is_no_number_is_shown(answer: Any) -> None:
    class Answers(ClusterEnvironment):
        def world_size(self) -> Any:
            return answer

    with pytest.raises(ConfigurationError, match=re.escape(f"{answer!r}, which is no whole number. Return an int.")):
        Answers().world_size()


# ---- what is detected ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _several_in_mpis_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py as it is under ``mpirun -n 2``, for those who find its variable."""
    from drivetrain.clusters import mpi

    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    monkeypatch.setattr(mpi, "mpi", SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 2)))


ORDER = [
    ("TorchElasticEnvironment", TORCHRUN), ("SLURMEnvironment", SLURM), ("LSFEnvironment", LSF),
    ("MPIEnvironment", MPI), ("HTCondorEnvironment", CONDOR), ("LocalEnvironment", {}),
]  # fmt: skip


@pytest.mark.parametrize("highest", range(len(ORDER)))
def test_the_order_of_detection(highest: int) -> None:
    variables: dict[str, str] = {"PATH": ""}
    for _, own in reversed(ORDER[highest:]):
        variables |= own
    environment, why = detect(variables)
    assert type(environment).__name__ == ORDER[highest][0]
    assert why == type(environment).evidence
    assert environment.environ is variables


@pytest.mark.parametrize(("name", "variables"), ORDER)
def test_each_is_found_by_its_own_variables(name: str, variables: dict[str, str]) -> None:
    assert type(detect({"PATH": "", **variables})[0]).__name__ == name


def test_s3_10_a_given_one_wins() -> None:
    mine = OfTheFirstGeneration()
    environment, why = detect(dict(TORCHRUN), mine)
    assert environment is mine
    assert why == "plugins holds a OfTheFirstGeneration"


def test_detect_reads_this_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    environment, _ = detect()
    assert environment.world_size() == 8
    assert "environ" not in vars(environment)  # so that it pickles, and reads the variables of where it is then


@pytest.fixture
def a_vendors() -> Iterator[type[ClusterEnvironment]]:
    class Vendors(ClusterEnvironment):
        """A scheduler that nobody has heard of."""

        detect_priority = 450
        evidence = "VENDOR_TASK is set"

        @classmethod
        def detect(cls, environ: Mapping[str, str] = os.environ) -> bool:
            return "VENDOR_TASK" in environ

    ClusterRegistry.register("vendors", Vendors)
    yield Vendors
    ClusterRegistry.remove("vendors")


def test_a_registered_one_takes_its_place_in_the_order(a_vendors: type[ClusterEnvironment]) -> None:
    environment, why = detect({**SLURM, "VENDOR_TASK": "1"})
    assert (type(environment), why) == (a_vendors, "VENDOR_TASK is set")
    assert type(detect({**TORCHRUN, "VENDOR_TASK": "1"})[0]).__name__ == "TorchElasticEnvironment"


def test_variables_that_cannot_be_written_are_copied() -> None:
    from types import MappingProxyType

    environment, _ = detect(MappingProxyType({"TORCHELASTIC_RUN_ID": "x"}))
    with pytest.warns(UserWarning, match="MASTER_PORT is not set"):
        assert environment.main_port == 12910


# ---- names -----------------------------------------------------------------------------------------------------------


def test_the_folder_is_the_registry() -> None:
    assert ClusterRegistry.available() == [
        "aws_batch",
        "dstack",
        "horovod",
        "htcondor",
        "kubeflow",
        "kubernetes",
        "local",
        "lsf",
        "mpi",
        "ray_train",
        "sagemaker",
        "skypilot",
        "slurm",
        "torchelastic",
        "vertex",
        "xla",
    ]
    assert all(entry.description for entry in ClusterRegistry.entries())
    assert type(ClusterRegistry.get("local")) is LocalEnvironment is LightningEnvironment


def test_familiar_import_path() -> None:
    assert all(hasattr(environments, name) for name in environments.__all__)
    assert environments.LightningEnvironment is LocalEnvironment


def test_no_torch_is_needed() -> None:
    program = "import sys, drivetrain.clusters; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
