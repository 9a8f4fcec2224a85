"""Two runs at the same time, with checkpoints of the same names in the same folder.

``python shared_folder_program.py FOLDER STORE``: STORE is "plain", or "background". At its end each run prints which
files it has written.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch._dynamo  # once, and not in each copy
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.plugins import AsyncCheckpointIO


class Net(LightningModule):
    """Its weight is the number of its run, and does not change."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(run)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(run: int, folder: str, store: str) -> None:
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_last=True)
    trainer = Trainer(
        max_steps=6, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saver], plugins=[AsyncCheckpointIO()] if store == "background" else [],
    )  # fmt: skip
    trainer.fit(Net(run), DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=1))
    said = json.dumps({"run": run, "files": [*saver.best_k_models, saver.last_model_path]})
    os.write(1, f"{said}\n".encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    pids = []
    for run in (1, 2):
        if (pid := os.fork()) == 0:
            try:
                fit(run, *sys.argv[1:])
            except BaseException as error:
                os.write(1, f"{json.dumps({'run': run, 'error': repr(error)})}\n".encode())
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
