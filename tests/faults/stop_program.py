"""A fit of two ranks in which one of them sends a signal, and which says how it ended.

``stuck``: no save ever ends. ``again``: the signal comes again and again, in a batch that does not end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer

STRATEGY, NUMBER, TO, IS_STUCK = sys.argv[1], int(sys.argv[2]), sys.argv[3], "stuck" in sys.argv


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 5 and self.global_rank == 1:
            while "again" in sys.argv:  # this batch never ends
                os.kill(os.getppid(), NUMBER)
                time.sleep(0.3)
            if TO == "launcher":
                os.kill(os.getppid(), NUMBER)
            else:
                group = ["kill", f"-{NUMBER}", "--", f"-{os.getpid()}"]  # this rank and its workers
                subprocess.run(group, check=True, start_new_session=True)
        return self.layer(batch).square().mean()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        while IS_STUCK:
            os.write(1, f"process {os.getpid()} saves\n".encode())
            signal.pause()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Tells(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        text = f"{type(exception).__name__} in step {trainer.global_step} of process {os.getpid()}\n"
        os.write(1, text.encode())


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=STRATEGY, max_epochs=-1, logger=False, callbacks=Tells(),
        stop_timeout_s=1 if IS_STUCK else 600, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(torch.randn(64, 4), batch_size=4, num_workers=0 if TO == "launcher" else 1))
