"""A program whose Trainer starts its processes itself: ``python started_program.py METHOD FILE``.

What the launching process sees afterwards goes to FILE, for tests/distributed/test_started_here.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: without this, each process that is copied from here would
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningDataModule, LightningModule, Trainer
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint
from drivetrain.errors import DrivetrainError
from drivetrain.loggers import CSVLogger
from drivetrain.strategies import DDPStrategy

COUNT = 37


class Regression(LightningModule):
    def __init__(self, lambda_scheduler: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1, bias=False))
        self.lambda_scheduler = lambda_scheduler

    def loss(self, batch: Any) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return batch[1]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if self.lambda_scheduler:
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(COUNT, 4, generator=generator)
        self.data = TensorDataset(x, torch.arange(COUNT).float()[:, None] / COUNT)
        self.epochs = 0

    def train_dataloader(self) -> Any:
        self.epochs += 1
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Counts(Callback):
    """Counts epochs in its state."""

    epochs = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Fails(LightningModule):
    """Its second rank does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            raise ZeroDivisionError("of rank 1")
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notices(Callback):
    """Writes down in a file, which all processes share, that somebody was told of an exception."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with self.path.open("a") as file:
            file.write(f"{trainer.global_rank} {type(exception).__name__}\n")


def trainer(method: str, folder: str, **arguments: Any) -> Trainer:
    return Trainer(**{
        "accelerator": "cpu", "devices": 2, "strategy": DDPStrategy(start_method=method), "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
        "num_sanity_val_steps": 0, "enable_checkpointing": False, **arguments,
    })  # fmt: skip


def weights(module: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten().double() for value in module.state_dict().values()])


def fitted(method: str, folder: str) -> dict[str, Any]:
    """A fit, and all that is asked of its Trainer afterwards."""
    torch.manual_seed(3)
    module, data, counts = Regression(), Data(), Counts()
    logger, saver, stopper = CSVLogger(folder), ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss")
    ours = trainer(method, folder, max_epochs=2, logger=logger, callbacks=[counts, saver, stopper],
                   enable_checkpointing=True, log_every_n_steps=1, precision="64-true")  # fmt: skip
    before = weights(module)
    ours.fit(module, datamodule=data)
    first = next(iter(module.parameters()))
    found: dict[str, Any] = {
        "weights": weights(module),
        "dtype": first.dtype,
        "moved": bool((weights(module) != before).any()),
        "steps": [float(ours.optimizers[0].state[parameter]["step"]) for parameter in module.parameters()],
        "rate": ours.lr_scheduler_configs[0].scheduler.get_last_lr(),
        "counters": (ours.global_step, ours.current_epoch, ours.progress.finished),
        "metrics": {name: float(value) for name, value in ours.callback_metrics.items()},
        "logged": sorted(ours.logged_metrics),
        "callbacks": (counts.epochs, saver.best_model_path, float(saver.best_model_score), float(stopper.best_score)),
        "written": (Path(ours.log_dir or "") / "metrics.csv").exists() and Path(saver.best_model_path).exists(),
        "loaders": data.epochs,
    }
    found["predicted"] = torch.cat(ours.predict(module, datamodule=data)).flatten()
    return {**found, **asked_again(ours, module, data, counts)} if method == "fork" else found


def asked_again(ours: Trainer, module: Regression, data: Data, counts: Counts) -> dict[str, Any]:
    """What the same Trainer does next."""
    found: dict[str, Any] = {
        "validated": ours.validate(module, datamodule=data, verbose=False),
        "best": ours.validate(datamodule=data, verbose=False, ckpt_path="best"),
    }
    found["optimizers"] = [type(optimizer).__name__ for optimizer in ours.optimizers]
    ours.fit_loop.max_epochs = 3
    before = weights(module)
    ours.fit(module, datamodule=data)
    found["again"] = (ours.global_step, counts.epochs, not torch.equal(weights(module), before))
    return found


def resumed(method: str, folder: str) -> dict[str, Any]:
    """Three epochs in one go, and after a checkpoint that the launching process has saved."""
    found = {}
    for first in (3, 2):
        torch.manual_seed(3)
        module, ours = Regression(), trainer(method, folder, max_epochs=first)
        ours.fit(module, datamodule=Data())
        if first == 2:
            ours.save_checkpoint(f"{folder}/two.ckpt")
            torch.manual_seed(4)
            module, ours = Regression(), trainer(method, folder, max_epochs=3)
            ours.fit(module, datamodule=Data(), ckpt_path=f"{folder}/two.ckpt")
        found[f"after {first}"] = (ours.global_step, weights(module))
    torch.manual_seed(3)
    module, ours = Regression(), trainer(method, folder, max_epochs=3, max_steps=7)  # an epoch has 5
    ours.fit(module, datamodule=Data())
    ours.save_checkpoint(f"{folder}/inside.ckpt")
    torch.manual_seed(4)
    module, ours = Regression(), trainer(method, folder, max_epochs=3)
    ours.fit(module, datamodule=Data(), ckpt_path=f"{folder}/inside.ckpt")
    found["after 7 steps"] = (ours.global_step, weights(module))
    found["ranks in the file"] = len(torch.load(f"{folder}/inside.ckpt", weights_only=True)["ranks"])
    return found


def failed(method: str, folder: str) -> dict[str, Any]:
    """A fit whose second rank raises."""
    notes = Path(folder) / "notes.txt"
    notes.touch()
    ours = trainer(method, folder, max_epochs=1, callbacks=Notices(notes))
    try:
        ours.fit(Fails(), Data().train_dataloader())
    except DrivetrainError as error:
        status = ours.progress.status.value
        return {"error": str(error), "cause": repr(error.__cause__), "status": status, "notes": notes.read_text()}
    return {}


def main() -> None:
    method, path = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        found = {"fitted": fitted(method, f"{folder}/a")}
        if method == "fork":
            found |= {"failed": failed(method, folder), "resumed": resumed(method, folder)}
            ours = trainer(method, folder, max_epochs=1)
            ours.fit(Regression(lambda_scheduler=True), datamodule=Data())
            ours.save_checkpoint(f"{folder}/lambda.ckpt")
            found["lambda"] = ours.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"]
    torch.save(found, path)


if __name__ == "__main__":
    main()
