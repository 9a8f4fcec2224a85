"""Run by test_ray.py: ``python ray_program.py FILE`` writes what launches and fits on a running cluster leave.

Ray is started here, once, and each case connects to it. With ``two`` after FILE it is one job on the two machines of
the cluster in RAY_ADDRESS; with an address after that, of this machine, it has connected to Ray before. What this file
defines travels by value, what it imports from started_program.py by name.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import started_program as program

from drivetrain import Engine
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.clusters import LocalEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import LaunchError, RayLauncher

LONG_S = 600
GONE_S = 30  # Ray does not wait for those that it kills
STORE_BYTES = 100 * 2**20
TOLD = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MINE", "OTHER_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)  # fmt: skip


class Mine(Exception):
    """Defined where the program is."""


class Value:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def engine() -> Engine:
    return Engine(accelerator="cpu", devices=2, strategy="ddp_ray")


# ---- what the actors know, and what comes back -----------------------------------------------------------------------


def returned(ours: Engine, rows: list[torch.Tensor]) -> Any:
    rows[1].add_(ours.global_rank + 1)
    facts = [{name: os.environ.get(name) for name in TOLD}, torch.get_num_threads(), torch.rand(1).item(), os.getcwd()]
    return ours.strategy.world.gather_objects(facts), [Value(row) for row in rows]


def case_returned(folder: str) -> Any:
    os.environ.update(MINE="here", OTHER_VISIBLE_DEVICES="3")
    torch.manual_seed(5)
    before, table = os.getcwd(), torch.zeros(2, 1000)
    os.chdir(folder)
    try:
        facts, values = engine().launch(returned, list(table))
        here = [torch.rand(1).item(), os.getcwd()]
    finally:
        os.chdir(before)
    first, second = (value.tensor for value in values)
    return {
        "facts": facts,
        "here": here,
        "sums": [float(first.sum()), float(second.sum()), float(table.sum())],
        "class": type(values[0]) is Value,
        "memory": first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr(),
    }


def case_fits_again(folder: str) -> Any:
    module, data, counts = program.Regression(), program.Data(), program.Counts()
    saver = ModelCheckpoint(folder, monitor="val_loss")
    ours = program.trainer(
        "ray", folder, max_epochs=2, enable_checkpointing=True, precision="64-true", callbacks=[counts, saver]
    )
    ours.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in ours.callback_metrics.items()}
    best = float(saver.best_model_score)  # type: ignore[arg-type]
    return {"metrics": metrics, "best_score": best, **program.asked_again(ours, module, data, counts)}


def case_resumed(folder: str) -> Any:
    return program.resumed("ray", folder)


def case_told(folder: str) -> Any:
    return program.failed("ray", folder)


def case_lambda(folder: str) -> Any:
    ours = program.trainer("ray", folder, max_epochs=1)
    ours.fit(program.Regression(lambda_scheduler=True), datamodule=program.Data())
    return ours.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"]


# ---- when one fails --------------------------------------------------------------------------------------------------


def fails(ours: Engine, folder: str, how: str) -> None:
    Path(folder, str(ours.global_rank)).write_text(str(os.getpid()))
    ours.barrier()
    if ours.global_rank == 1:
        if how == "raises":
            raise Mine("of rank 1")
        if how == "exits":
            sys.exit(3)
        if how == "interrupts":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is killed in an exchange":
        ours.barrier()
    time.sleep(LONG_S)


def case_failed(folder: str) -> Any:
    """For each way how: what is raised here, after how long, and which processes are still alive."""
    found = {}
    for how in ("raises", "exits", "is killed", "is killed in an exchange", "interrupts"):
        began = time.monotonic()
        try:
            engine().launch(fails, folder, how)
        except (LaunchError, KeyboardInterrupt) as error:
            seconds, cause = time.monotonic() - began, error.__cause__
            told = [getattr(error, "rank", None), getattr(error, "exit_code", None), str(error), type(cause).__name__]
            processes = [int(Path(folder, str(rank)).read_text()) for rank in range(2)]
            while any(map(psutil.pid_exists, processes)) and time.monotonic() < began + seconds + GONE_S:
                time.sleep(0.05)
            alive = [pid for pid in processes if psutil.pid_exists(pid)]
            found[how] = [type(error).__name__, *told, type(cause) is Mine, seconds, alive]
    return found


def refused(launch: Callable[[], Any]) -> str:
    try:
        launch()
    except ConfigurationError as error:
        return str(error)
    raise AssertionError("it was not refused")


def case_refused(folder: str) -> Any:
    here = LocalEnvironment()
    return {
        "no room": refused(lambda: RayLauncher(here, 3, start_timeout_s=0.1).launch(print)),
        "no machine": refused(lambda: RayLauncher(here, 1, 2, start_timeout_s=0.1).launch(print)),
        "unpicklable": refused(lambda: RayLauncher(here, 1).launch(print, (number for number in "12"))),
        "unpicklable result": failure_of(lambda: RayLauncher(here, 1).launch(generator)),
    }


def generator() -> Any:
    return (number for number in "12")


def failure_of(launch: Callable[[], Any]) -> str:
    try:
        launch()
    except LaunchError as error:
        return f"{error.rank} {error}"
    raise AssertionError("it did not fail")


# ---- devices ---------------------------------------------------------------------------------------------------------


def devices() -> Any:
    """The devices that each process sees, and the one that Ray has reserved for it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    found: list[Any] = [None] * world_size
    reserved = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    dist.all_gather_object(found, [os.environ["CUDA_VISIBLE_DEVICES"].split(","), reserved])
    dist.destroy_process_group()
    return found


def on_a_cluster_with_devices() -> Any:
    """It believes to have four of them; one is taken."""
    ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, object_store_memory=STORE_BYTES)
    other = ray.remote(num_gpus=1)(Value).remote(None)
    ray.get(other.__ray_ready__.remote())
    os.environ["CUDA_VISIBLE_DEVICES"] = "9"  # of this process
    return RayLauncher(LocalEnvironment(), 2, resources={"CPU": 1, "GPU": 1}).launch(devices)


# ---- two machines ----------------------------------------------------------------------------------------------------


def place(ours: Engine) -> Any:
    names = ("MASTER_ADDR", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MINE", "NODES_OWN")
    facts = [socket.gethostname(), {name: os.environ.get(name) for name in names}]
    return ours.strategy.world.gather_objects(facts)


def two_machines() -> Any:
    os.environ.update(MINE="here", NODES_OWN="here")
    for address in sys.argv[3:]:  # where Ray would take the machine for another one, whose processes it sees too
        ray.init(address=os.environ["RAY_ADDRESS"], _node_ip_address=address)
    found = {"places": Engine(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp_ray").launch(place)}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(3)
        module = program.Regression()
        ours = program.trainer("ray", folder, devices=1, num_nodes=2, max_epochs=2, precision="64-true")
        ours.fit(module, datamodule=program.Data())
        found |= {"weights": program.weights(module), "world_size": ours.world_size, "step": ours.global_step}
    return found


def main() -> None:
    if "two" in sys.argv:
        torch.save(two_machines(), sys.argv[1])
        return
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=STORE_BYTES)
    cases = {name.removeprefix("case_"): case for name, case in globals().items() if name.startswith("case_")}
    found = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = case(folder)
    found["connected"] = ray.is_initialized()
    ray.shutdown()
    unreachable = RayLauncher(LocalEnvironment(), 1, address="127.0.0.1:1")
    found["refused"]["nobody there"] = refused(lambda: unreachable.launch(print))
    found["devices"] = on_a_cluster_with_devices()
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    main()
