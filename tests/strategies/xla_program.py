"""Two replicas on the stand-in of torch_xla: what they exchange, and what they train to. Writes a file of results."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once, and not in each replica
import torch_xla_standin as standin
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, Engine, Trainer
from drivetrain.checkpoints import XLACheckpointIO
from drivetrain.launchers.launcher import LaunchError
from drivetrain.strategies import XLAStrategy
from drivetrain.testing._regression import GLOBAL_BATCH, Small, data

FOLDER = Path(sys.argv[1])
SIZE = 2


class Noted(XLACheckpointIO):
    """Notes which rank writes and removes."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        (FOLDER / f"wrote-{Path(path).name}-{os.environ['RANK']}").touch()
        super().save_checkpoint(checkpoint, path)

    def remove_checkpoint(self, path: Any) -> None:
        (FOLDER / f"removed-{Path(path).name}-{os.environ['RANK']}").touch()
        super().remove_checkpoint(path)


class Different(Small):
    """Its weights differ between ranks until the strategy makes them those of rank 0."""

    def setup(self, stage: str) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(self.trainer.global_rank)


class Observer(Callback):
    """Notes what is true of each replica while it trains."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        weights = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        everyones = strategy.all_gather(weights)
        self.seen["equal at start"] = bool((everyones == everyones[0]).all())
        self.seen["debug"] = os.environ.get("PT_XLA_DEBUG")
        self.seen["wrapped"] = strategy.model is not pl_module
        loader = trainer.train_dataloader
        self.seen["loader"] = [type(loader).__name__, strategy.process_dataloader(loader) is loader]
        self.seen["loader has"] = [hasattr(loader, name) for name in ("dataset", "batch_sampler")]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        standin.CALLS.clear()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen["syncs"] = standin.CALLS.count(("sync",))
        name = f"epoch-{trainer.current_epoch}"
        trainer.save_checkpoint(FOLDER / f"{name}.ckpt")
        if trainer.current_epoch:
            trainer.strategy.remove_checkpoint(FOLDER / f"{name}.ckpt")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        gathered = trainer.strategy.world.gather_objects(self.seen)
        if trainer.is_global_zero:
            torch.save(gathered, FOLDER / "seen.pt")


def exchanges(engine: Engine) -> list[Any]:
    strategy: Any = engine.strategy
    rank = strategy.global_rank
    found: dict[str, Any] = {"ranks": (rank, strategy.local_rank, strategy.node_rank, strategy.world_size)}
    found["variables"] = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    found["environment"] = type(strategy.cluster_environment).__name__

    mine = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    gathered = strategy.all_gather(mine, sync_grads=True)
    (gathered * torch.tensor([[1.0, 10.0], [100.0, 1000.0]]) * (rank + 1)).sum().backward()
    found["gathered"], found["gradient"] = gathered.detach(), mine.grad
    found["gathered scalar"] = strategy.all_gather(torch.tensor(float(rank)))
    found["gathered flags"] = strategy.all_gather(torch.tensor([rank == 1, True]))
    found["gathered, with a group"] = strategy.all_gather(torch.tensor([rank]), group=object())
    try:
        strategy.all_gather([1])
    except NotImplementedError as error:
        found["gathered list"] = str(error)

    for name, operation in {
        "default": {}, "None": {"reduce_op": None}, "sum": {"reduce_op": "sum"}, "SUM": {"reduce_op": "SUM"},
        "avg": {"reduce_op": "avg"}, "max": {"reduce_op": torch.distributed.ReduceOp.MAX}, "group": {"group": object()},
    }.items():  # fmt: skip
        found[f"reduced, {name}"] = strategy.reduce(torch.tensor([1.0 + rank, 4.0]), **operation)
    found["reduced ints"] = strategy.reduce(torch.tensor([1 + rank]))
    found["reduced text"] = strategy.reduce("text")

    found["broadcast object"] = strategy.broadcast({"rank": rank, "weights": torch.tensor([rank])}, src=1)
    found["broadcast tensor"] = strategy.broadcast(torch.tensor([[float("nan") if rank else 7.0]]))
    found["broadcast scalar"] = strategy.broadcast(torch.tensor(3 if rank else 5), src=1)
    found["broadcast flags"] = strategy.broadcast(torch.tensor([rank == 0, True]))
    found["broadcast to others"] = strategy.broadcast(torch.tensor([2.5]) if rank else None, src=1)

    moment = time.monotonic()
    if rank == 0:
        (FOLDER / "first").touch()
    strategy.barrier()
    found["barrier"] = (FOLDER / "first").exists(), moment <= time.monotonic()
    standin.CALLS.clear()
    strategy.barrier("a name", "more", tag="more")
    found["rendezvous"] = list(standin.CALLS)
    found["keyed"] = strategy.world.gather_keyed(["a", "b"], torch.tensor([1.0, rank]))
    found["decisions"] = [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)]

    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight = tied[0].weight
    engine.setup(tied)
    found["tied"] = tied[0].weight is tied[1].weight
    everyones: list[Any] = strategy.world.gather_objects(found)
    return everyones


def fails(engine: Engine) -> None:
    if engine.global_rank == 1:
        raise ZeroDivisionError("on purpose")
    engine.barrier()
    time.sleep(60)


def trainer(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "xla", "devices": SIZE, "precision": "64-true", "max_epochs": 2, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def loaders(devices: int = SIZE) -> list[Any]:
    return [DataLoader(data(count), batch_size=GLOBAL_BATCH // devices) for count in (6, 2)]


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def main() -> None:
    standin.install()
    os.environ["CPU_NUM_DEVICES"] = str(SIZE)
    results: dict[str, Any] = {}
    # first, so that what a fit imports is there in every copy of this process
    elsewhere = trainer(accelerator="cpu", strategy="single_device", devices=1, max_epochs=1)
    elsewhere.fit(Small(), *loaders(1))
    elsewhere.save_checkpoint(FOLDER / "elsewhere.ckpt")
    results["exchanged"] = Engine(accelerator="xla", devices=SIZE, strategy="xla").launch(exchanges)

    module, observer = Different(), Observer()
    first = trainer(strategy=XLAStrategy(checkpoint_io=Noted(), debug=True), callbacks=[observer])
    first.fit(module, *loaders())
    results["fit"], results["debug after"] = weights(module), os.environ.get("PT_XLA_DEBUG")
    results["validated"] = first.validate(module, loaders()[1], verbose=False)  # the same Trainer launches again

    module = Small()
    trainer(strategy="xla", accumulate_grad_batches=4, gradient_clip_val=0.05).fit(module, *loaders())
    results["accumulated"] = weights(module)

    module = Small()
    trainer(strategy="xla", precision="32-true").fit(module.float(), *loaders(), ckpt_path=FOLDER / "elsewhere.ckpt")
    results["resumed"] = weights(module)

    began = time.monotonic()
    try:
        Engine(accelerator="xla", devices=SIZE, strategy="xla").launch(fails)
    except LaunchError as error:
        results["failure"] = [str(error), type(error.__cause__).__name__, time.monotonic() - began < 30]
    results["spawned"] = [call for call in standin.CALLS if call[0] == "spawn"]
    torch.save(results, FOLDER / "results.pt")


if __name__ == "__main__":
    main()
