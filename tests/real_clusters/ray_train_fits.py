"""Run by test_ray_train.py: ``python ray_train_fits.py FOLDER CASE...`` runs fits in Ray Train, on two nodes of Ray.

Each case gets a folder of its own in FOLDER, and leaves in ``found.json`` what Ray has returned. The program that the
workers run is train.py, which knows nothing of Ray, or a function of this file.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
from pyarrow.fs import FileSelector, FileType, LocalFileSystem, S3FileSystem
from ray import tune
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

TRAIN = Path(__file__).with_name("train.py")
BUCKET = "bucket/runs"
STORE_BYTES = 100 * 2**20
# The address tells the nodes apart: Ray Train counts workers with one address as workers of one machine.
SECOND = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "node_ip_address": "127.0.0.2"}
LONG_S = 300
RESIZE_S = 2.0  # Ray looks so often whether there are more machines


def program(config: dict[str, Any]) -> None:
    """Run train.py as ``python train.py`` would."""
    sys.argv = [str(TRAIN), config["folder"], *config["options"]]
    runpy.run_path(str(TRAIN), run_name="__main__")


def fit(
    function: Callable[..., Any], folder: Path, workers: Any, failures: int = 0, *options: str,
    storage: Any = None, name: str = "run", **own: Any,
) -> Any:  # fmt: skip
    """Run ``function``, which trains in the folder in DISK or in this one; Ray's storage is in this one, or in
    the bucket of a file system of pyarrow."""
    return TorchTrainer(
        function,
        train_loop_config={"folder": os.environ.get("DISK", str(folder)), "options": list(options)},
        torch_config=TorchConfig(backend="gloo"),  # which Ray takes by itself but for workers with GPUs
        scaling_config=ScalingConfig(num_workers=workers, **own),
        run_config=RunConfig(
            storage_path=BUCKET if storage else str(folder / "storage"),
            storage_filesystem=storage,
            name=name,
            failure_config=FailureConfig(max_failures=failures),
        ),
    ).fit()


def told(result: Any) -> dict[str, Any]:
    """What a result says, as plain data."""
    reported = [(path.path, metrics) for path, metrics in result.best_checkpoints]
    return {"metrics": result.metrics, "checkpoint": result.checkpoint.path, "reported": reported}


def wait_for(what: str, found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LONG_S
    while not (result := found()):
        assert time.monotonic() < deadline, f"waited {LONG_S} seconds in vain for {what}"
        time.sleep(0.2)
    return result


# ---- cases -----------------------------------------------------------------------------------------------------------


def killed(folder: Path, disks: list[Path], *options: str, storage: Any = None) -> Any:
    """Train on two nodes; one worker is killed in the second epoch, when Ray knows the checkpoint of the first.

    A report reaches Ray about a second after the worker has made it.
    """
    for disk in disks:
        (disk / "kill1").write_text("6")
    files, where = (storage, BUCKET) if storage else (LocalFileSystem(), folder / "storage")
    known = f"{where}/run/checkpoint_manager_snapshot.json"

    def is_known() -> bool:
        if files.get_file_info(known).type == FileType.NotFound:
            return False
        with files.open_input_stream(known) as stream:
            return b"checkpoint_2" in stream.read()

    def wait() -> None:
        wait_for("a checkpoint that Ray knows", is_known)
        orders = [disk / "kill1" for disk in disks]
        wait_for("a worker that waits for its end", lambda: not all(order.exists() for order in orders))
        for order in orders:
            order.unlink(missing_ok=True)  # the ranks may change places
            order.with_name("go").touch()

    threading.Thread(target=wait, daemon=True).start()
    spread = {"placement_strategy": "STRICT_SPREAD"}
    return told(fit(program, folder, 2, 1, "--devices", "auto", "--save", *options, storage=storage, **spread))


def case_killed(folder: Path, cluster: Cluster) -> Any:
    return killed(folder, [folder])


def case_s3(folder: Path, cluster: Cluster) -> Any:
    """The same with Ray's storage on an S3 server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    files = S3FileSystem(
        access_key="tests", secret_key="tests", region="us-east-1", scheme="http",
        endpoint_override=f"{host}:{port}", allow_bucket_creation=True,
    )  # fmt: skip
    files.create_dir(BUCKET)
    returned = killed(folder, [folder], storage=files)
    found = files.get_file_info(FileSelector(BUCKET, recursive=True))
    server.stop()
    return {**returned, "objects": [each.path for each in found if each.type == FileType.File]}


def case_disks(folder: Path, cluster: None) -> Any:
    """The same where the nodes have disks of their own, and share only Ray's storage."""
    return killed(folder, [Path(disk) for disk in os.environ["DISKS"].split(":")], "--dropout", "0.5")


def small_module() -> Any:
    """A module for batches of four numbers."""
    import torch

    from drivetrain import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[0]).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def inside(config: dict[str, Any]) -> None:
    """Fit twice, with saves in the background, in a worker whose process group is Ray's."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain import Trainer
    from drivetrain.callbacks import ModelCheckpoint
    from drivetrain.errors import ConfigurationError
    from drivetrain.plugins import AsyncCheckpointIO

    def trainer(strategy: Any, folder: str) -> Trainer:
        saves = ModelCheckpoint(Path(config["folder"], folder), save_last=True, every_n_train_steps=3)
        return Trainer(
            accelerator="cpu", strategy=strategy, max_epochs=2, callbacks=[saves], plugins=[AsyncCheckpointIO()],
            logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    group, loader = dist.group.WORLD, DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
    first, second = trainer("ddp", "first"), trainer("fsdp", "second")
    first.fit(small_module(), loader)
    second.fit(small_module(), loader)
    try:
        refused = str(Trainer(accelerator="cpu", devices=3).plan)
    except ConfigurationError as error:
        refused = str(error)
    found = {
        "callbacks": [type(each).__name__ for each in first.callbacks], "plan": str(first.plan),
        "kept": dist.group.WORLD is group, "steps": [first.global_step, second.global_step], "refused": refused,
        "slurm": os.environ.get("SLURM_NTASKS"),
    }  # fmt: skip
    Path(config["folder"], f"inside{first.global_rank}.json").write_text(json.dumps(found))


def case_inside(folder: Path, cluster: Cluster) -> Any:
    return told(fit(inside, folder, 2))


def reserved(config: dict[str, Any]) -> None:
    """Write down the device that Ray names, and the one that a Trainer takes; then train on the processors."""
    import torch
    from ray.train.torch import get_device
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain import Trainer
    from drivetrain.accelerators import Accelerator

    class Pretended(Accelerator):
        """GPUs, as far as the choice of one goes."""

        name = autocast_device_type = "cuda"
        device_count_is_limit = True

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def auto_device_count() -> int:
            return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("cuda", index) for index in devices]

        def setup_device(self, device: torch.device) -> None:
            """There is none."""

        def teardown(self) -> None:
            """There is none."""

        def get_device_stats(self, device: torch.device) -> dict[str, Any]:
            return {}

    trainer = Trainer(accelerator=Pretended(), logger=False)
    devices = [str(get_device()), str(trainer.strategy.root_device)]
    Path(config["folder"], f"{config['options'][0]}-{trainer.global_rank}").write_text(json.dumps(devices))
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(small_module(), DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2))


def case_gpus(folder: Path, cluster: Cluster) -> Any:
    """The nodes have none: Ray believes what two_nodes() says."""
    for name, share in {"two": 2, "half": 0.5}.items():
        gpus = {"use_gpu": True, "resources_per_worker": {"GPU": share, "CPU": 0.1}}
        fit(reserved, folder, 2, 0, name, name=name, **gpus)
    return {}


def events(folder: Path) -> list[dict[str, Any]]:
    [path] = list(folder.glob("*.events")) or [None]
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path else []


def newest_step(folder: Path, workers: int) -> int:
    """Return the newest step of so many workers; 0: there is none."""
    found = [each for each in events(folder) if each["event"] == "step"]
    return max((each["step"] for each in found if each["world_size"] == workers), default=0)


def first_step(folder: Path, workers: int) -> float:
    """Return the step at which so many workers have last started; infinity: they have not."""
    found = [each for each in events(folder) if each["event"] == "start" and each["world_size"] == workers]
    return max((each["step"] for each in found), default=float("inf"))


def case_elastic(folder: Path, cluster: Cluster) -> Any:
    """One to three workers: of three, one node with one of them is removed, and later comes back."""
    returned: list[Any] = []

    def run() -> None:
        options = ("--devices", "auto", "--save", "--epochs", "40", "--pause", "1")
        returned.append(fit(program, folder, (1, 3), 5, *options, elastic_resize_monitor_interval_s=RESIZE_S))

    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "30"  # so long Ray waits for a node that is gone
    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for("steps of three workers", lambda: newest_step(folder, 3) > 8)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        # four steps later they have saved, and about a second after that Ray knows it
        wait_for("a checkpoint of two workers", lambda: newest_step(folder, 2) > first_step(folder, 2) + 6)
        before = newest_step(folder, 3)
        cluster.add_node(**SECOND)
        wait_for("later steps of three workers", lambda: newest_step(folder, 3) > before)
    finally:
        (folder / "hurry").touch()
        thread.join()
    return told(returned[0])


def trial(config: dict[str, Any]) -> None:
    """Run Ray Train in a trial of Ray Tune."""
    folder = Path(config["folder"]) / f"epochs{config['epochs']}"
    folder.mkdir()
    options = ["--devices", "auto", "--save", "--epochs", str(config["epochs"])]
    trainer = TorchTrainer(
        program,
        train_loop_config={"folder": str(folder), "options": options},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(folder / "storage"), name="run", callbacks=[TuneReportCallback()]),
    )
    trainer.fit()


def case_tune(folder: Path, cluster: Cluster) -> Any:
    space = {"epochs": tune.grid_search([1, 3]), "folder": str(folder)}
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.1}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), name="tune"),
    )
    results = tuner.fit()
    best = results.get_best_result("step", "max")
    return {
        "errors": [str(error) for error in results.errors],
        "steps": sorted(result.metrics["step"] for result in results),
        "best": best.config["epochs"],
        "checkpoint": best.metrics["checkpoint_path"],
    }


def two_nodes() -> Cluster:
    # As if SLURM had started the cluster: workers inherit such variables.
    os.environ.update(SLURM_NTASKS="7", SLURM_PROCID="3", SLURM_LOCALID="3", SLURM_NODEID="1", SLURM_JOB_NAME="ray")
    head = {"num_cpus": 2, "num_gpus": 4, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**SECOND)
    return cluster


def main() -> None:
    folder, *cases = sys.argv[1:]
    cluster = None if "RAY_ADDRESS" in os.environ else two_nodes()
    ray.init(address=os.environ.get("RAY_ADDRESS") or cluster.address)  # type: ignore[union-attr]
    for case in cases:
        own = Path(folder, case)
        own.mkdir()
        (own / "found.json").write_text(json.dumps(globals()[f"case_{case}"](own, cluster)))
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()


if __name__ == "__main__":
    main()
