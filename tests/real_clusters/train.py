"""A job for a real cluster: ``python train.py FOLDER`` trains a small model, and leaves in FOLDER what it was.

Every process writes ``rank<r>.json`` when it is done. While it trains, it adds a line to ``<host>.events`` for its
start and for each step. If there is a file ``kill<r>`` with the number of a step, rank r removes it after that step,
waits for a file ``go``, and kills itself.

All runs with the same number of epochs and the same ``--batch-size``, which is that of all processes together, see the
same batches in the same order and come to the same weights, however many processes share them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.clusters import SLURMEnvironment

SAMPLES = 48


class Regression(LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).double()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Notes(Callback):
    """Writes down each start and each step, and pauses between steps until somebody is in a hurry."""

    def __init__(self, folder: Path, pause: float) -> None:
        self.folder, self.pause = folder, pause

    def note(self, **event: Any) -> None:
        with (self.folder / f"{socket.gethostname()}.events").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(event="start", step=trainer.global_step, rank=trainer.global_rank, world_size=trainer.world_size)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(event="step", step=trainer.global_step, rank=trainer.global_rank, world_size=trainer.world_size)
        if self.pause and not (self.folder / "hurry").exists():
            time.sleep(self.pause)
        order = self.folder / f"kill{trainer.global_rank}"
        if order.exists() and int(order.read_text()) == trainer.global_step:
            order.unlink()
            while not (self.folder / "go").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class SlowSave(ModelCheckpoint):
    """Saves nothing by itself, and lets every save take its time."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__(folder, every_n_epochs=1_000_000)
        self.seconds = seconds

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        time.sleep(self.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=lambda text: text if text == "auto" else int(text), default=1)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=12, help="of all processes together")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, until there is a file 'hurry'")
    parser.add_argument("--no-requeue", action="store_true", help="leave SLURM's announcement of the end alone")
    parser.add_argument("--save", action="store_true", help="save at the end of each epoch")
    parser.add_argument("--slow-save", type=float, default=0.0, help="seconds that a save takes; none until it stops")
    arguments = parser.parse_args()
    folder = arguments.folder

    seed_everything(1)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    callbacks: list[Callback] = [Notes(folder, arguments.pause)]
    if arguments.slow_save:
        callbacks.append(SlowSave(folder / "checkpoints", arguments.slow_save))
    trainer = Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=arguments.strategy,
        num_nodes=arguments.num_nodes,
        max_epochs=arguments.epochs,
        callbacks=callbacks,
        plugins=[SLURMEnvironment(auto_requeue=False)] if arguments.no_requeue else None,
        logger=False,
        enable_checkpointing=arguments.save or arguments.slow_save > 0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = DataLoader(data, arguments.batch_size // trainer.world_size, shuffle=True)
    model = Regression(arguments.dropout)
    trainer.fit(model, loader)
    facts = {
        "host": socket.gethostname(),
        "environment": type(trainer.plan.environment).__name__,
        "plan": str(trainer.plan),
        **{name: getattr(trainer, name) for name in ("world_size", "global_rank", "local_rank", "node_rank")},
        "step": trainer.global_step,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
