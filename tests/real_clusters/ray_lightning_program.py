"""Run by test_ray_train.py: a program for Lightning as Ray's guide writes it, whose second worker is killed once.

python -m drivetrain.compat ray_lightning_program.py FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

LONG_S = 300


def train_func(config: dict[str, Any]) -> None:
    import lightning.pytorch as pl
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    folder = Path(config["folder"])

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[0]).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Killed(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            with (folder / f"steps{trainer.global_rank}").open("a") as file:
                file.write(f"{trainer.global_step}\n")
            order = folder / f"kill{trainer.global_rank}"
            if order.exists() and trainer.global_step == 6:
                order.unlink()
                while not (folder / "go").exists():
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = pl.Trainer(
        max_epochs=3, devices="auto", accelerator="cpu", strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()], callbacks=[RayTrainReportCallback(), Killed()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False,
    )  # fmt: skip
    trainer = prepare_trainer(trainer)
    loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as place:
            trainer.fit(Module(), loader, ckpt_path=os.path.join(place, "checkpoint.ckpt"))
    else:
        trainer.fit(Module(), loader)
    found = {
        "class": pl.Trainer.__module__.partition(".")[0], "step": trainer.global_step,
        "callbacks": [type(each).__name__ for each in trainer.callbacks],
    }  # fmt: skip
    (folder / f"found{trainer.global_rank}.json").write_text(json.dumps(found))


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "kill1").touch()
    known = folder / "storage" / "run" / "checkpoint_manager_snapshot.json"

    def wait() -> None:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline and not (known.exists() and "checkpoint_2" in known.read_text()):
            time.sleep(0.2)
        (folder / "go").touch()

    threading.Thread(target=wait, daemon=True).start()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    result = TorchTrainer(
        train_func,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(folder / "storage"), name="run", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    reported = [metrics for _, metrics in result.best_checkpoints]
    (folder / "result.json").write_text(json.dumps(reported))


if __name__ == "__main__":
    main()
