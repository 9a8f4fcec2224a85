"""Objects of real Lightning in the place of drivetrain's: prints those that are not refused by their package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import Engine, Trainer
from drivetrain.cli import LightningCLI
from drivetrain.errors import ConfigurationError
from drivetrain.tuner import Tuner

CURE = "import it from drivetrain, or run the program unchanged with `drivetrain exec`"
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "max_epochs": 1, "enable_model_summary": False}


class Net(drivetrain.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> Any:
    return DataLoader(torch.ones(4, 2))


def fit(model: Any, *args: Any, datamodule: Any = None, **arguments: Any) -> None:
    Trainer(**{**QUIET, **arguments}).fit(model, *args, datamodule=datamodule)


def attempts(package: str, folder: str) -> dict[str, Callable[[], Any]]:
    def of(path: str) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"{package}.{module}" if module else package), name)

    model, data = type("M", (of("LightningModule"),), {}), type("D", (of("LightningDataModule"),), {})
    callback = type("C", (of("Callback"),), {})
    strategy, precision = of("strategies.DDPStrategy"), of("plugins.MixedPrecision")
    plugins = {
        "environment": of("plugins.environments.LightningEnvironment"), "store": of("plugins.io.TorchCheckpointIO"),
        "async store": of("plugins.io.AsyncCheckpointIO"), "layer sync": of("plugins.layer_sync.TorchSyncBatchNorm"),
        "precision": lambda: precision("bf16-mixed", "cpu"),
    }  # fmt: skip
    return {
        "model": lambda: fit(model(), loader()),
        "model class": lambda: fit(model, loader()),
        "data module": lambda: fit(Net(), datamodule=data()),
        "data module as loader": lambda: fit(Net(), data()),
        "loader": lambda: fit(Net(), of("utilities.CombinedLoader")([loader()])),
        "callback": lambda: fit(Net(), loader(), callbacks=callback()),
        "callback class": lambda: fit(Net(), loader(), callbacks=[callback]),
        "checkpoint": lambda: fit(Net(), loader(), callbacks=[of("callbacks.ModelCheckpoint")(folder)]),
        "configure_callbacks": lambda: fit(
            type("Own", (Net,), {"configure_callbacks": lambda self: [callback()]})(), loader()
        ),
        "logger": lambda: fit(Net(), loader(), logger=of("loggers.CSVLogger")(folder)),
        "loggers": lambda: fit(Net(), loader(), logger=[of("loggers.CSVLogger")(folder)]),
        "strategy": lambda: fit(Net(), loader(), strategy=strategy()),
        "accelerator": lambda: fit(Net(), loader(), accelerator=of("accelerators.CPUAccelerator")()),
        "profiler": lambda: fit(Net(), loader(), profiler=of("profilers.SimpleProfiler")()),
        "engine's strategy": lambda: Engine(accelerator="cpu", strategy=strategy()),
        "tuner's trainer": lambda: Tuner(of("Trainer")(**QUIET)).lr_find(Net(), loader()),
        "cli's model": lambda: LightningCLI(model, args=["fit"]),
        "cli's data": lambda: LightningCLI(Net, data, args=["fit"]),
        "cli's trainer": lambda: LightningCLI(Net, trainer_class=of("Trainer"), args=["fit"]),
        **{name: lambda made=made: fit(Net(), loader(), plugins=[made()]) for name, made in plugins.items()},
    }


for package in ("lightning.pytorch", "pytorch_lightning"):
    for name, attempt in attempts(package, sys.argv[1]).items():
        try:
            attempt()
        except ConfigurationError as error:
            if CURE not in str(error):
                print(f"taken or not named: {package}: {name}: {error}")
        except Exception as error:
            print(f"taken or not named: {package}: {name}: {error!r}")
        else:
            print(f"taken or not named: {package}: {name}")
