"""The environment of a worker of Ray Train, with a stand-in for ``ray.train``; real_clusters/ has the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.clusters.test_environment import LSF, SLURM, TORCHRUN
from tests.clusters.test_machines import Four

from drivetrain.clusters import RayTrainEnvironment, detect
from drivetrain.errors import ConfigurationError
from drivetrain.plan import Machine, Plan, resolve
from drivetrain.settings import Settings

# What TorchTrainer of Ray 2.60 sets: the last of three workers, two of which are on another machine.
WORKER = {
    "RANK": "2", "LOCAL_RANK": "0", "NODE_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "48883", "ACCELERATE_TORCH_DEVICE": "cpu",
}  # fmt: skip
BESIDE = {**WORKER, "RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def outside() -> Any:
    raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")


@pytest.fixture(params=[WORKER, BESIDE], ids=["alone on its machine", "beside another"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    variables: dict[str, str] = request.param
    context = SimpleNamespace(get_world_rank=lambda: int(variables["RANK"]))
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    return dict(variables)


def planned(variables: dict[str, str], **arguments: Any) -> Plan:
    machine = Machine(environment=(RayTrainEnvironment(variables), "x"), has_tensorboard=False)
    return resolve(Settings(**{"accelerator": "cpu", **arguments}), machine)


def test_a_worker_is_recognised_and_inherited_variables_of_other_clusters_are_not_read(worker: dict[str, str]) -> None:
    environment, why = detect({**TORCHRUN, **SLURM, **LSF, **worker})
    assert type(environment) is RayTrainEnvironment
    assert why == "this process is a worker of Ray Train"
    ranks = [environment.global_rank(), environment.local_rank(), environment.node_rank(), environment.world_size()]
    assert ranks == [int(worker[name]) for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")]
    assert (environment.main_address, environment.main_port) == ("10.0.0.4", 48883)
    assert environment.creates_processes_externally


def test_another_process_is_not_a_worker(worker: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    del worker["RANK"]
    assert type(detect(dict(worker))[0]).__name__ == "LocalEnvironment"  # a worker of another trainer of Ray
    worker["RANK"] = "0"
    assert type(detect(dict(worker))[0]).__name__ == "LocalEnvironment"  # the ranks differ: it is another job's
    monkeypatch.setattr(sys.modules["ray.train"], "get_context", outside)
    assert type(detect({**worker, "RANK": "1"})[0]).__name__ == "LocalEnvironment"
    monkeypatch.delitem(sys.modules, "ray.train")
    assert type(detect({**worker, "RANK": "1"})[0]).__name__ == "LocalEnvironment"


@pytest.mark.parametrize("accelerator", ["cpu", Four()], ids=["cpu", "four devices with numbers"])
@pytest.mark.parametrize("num_nodes", [1, 5])
def test_devices_are_those_of_the_workers_on_each_machine_whatever_num_nodes_is(
    worker: dict[str, str], accelerator: Any, num_nodes: int
) -> None:
    plan = planned(worker, accelerator=accelerator, num_nodes=num_nodes)
    assert len(plan.devices) == int(worker["LOCAL_WORLD_SIZE"])
    assert plan.num_nodes == 3 // len(plan.devices)
    assert plan.start_method is None
    assert dict((each.what, each.choice) for each in plan.decisions)["processes"] == "3, started by RayTrain"


@pytest.mark.parametrize(
    ("shown", "workers", "numbers"),
    [(2, 2, [0, 1]), (4, 2, [0, 2]), (8, 2, [0, 4]), (1, 2, [0, 0]), (2, 4, [0, 0, 1, 1]), (4, 1, [0])],
)
def test_each_worker_takes_the_first_device_that_ray_has_reserved_for_it(
    shown: int, workers: int, numbers: list[int]
) -> None:
    class Shown(Four):
        device_count_is_limit = True

        @staticmethod
        def auto_device_count() -> int:
            return shown

    variables = {**WORKER, "RANK": "0", "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    for given in ({}, {"devices": workers}, {"devices": str(workers)}, {"devices": -1}):
        assert [device.index for device in planned(variables, accelerator=Shown(), **given).devices] == numbers
    with pytest.raises(
        ConfigurationError, match=rf"devices={workers + 1}( means the dev|, but Ray Train runs {workers} )"
    ):
        planned(variables, accelerator=Shown(), devices=workers + 1)


def test_another_number_of_devices_is_refused(worker: dict[str, str]) -> None:
    workers = int(worker["LOCAL_WORLD_SIZE"])
    assert len(planned(worker, devices=workers).devices) == workers
    with pytest.raises(ConfigurationError) as caught:
        planned(worker, devices=3)
    assert str(caught.value) == (
        f"devices=3, but Ray Train runs {workers} workers on this machine. Leave devices out, and write the number of "
        "all workers in ScalingConfig(num_workers=...)."
    )
