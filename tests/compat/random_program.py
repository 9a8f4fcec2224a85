"""Random training programs, and what their hooks, loggers and callers see: ``random_program.py FIRST LAST``.

Prints one JSON list with a trace for each seed. It leaves out what docs/compat.md lists as different: loaders without a
length that end early, partly logged manual steps, values that are logged once per epoch while it runs.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

Trace = list[list[Any]]
HOOKS = [
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start",
    "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_test_start", "on_test_end", "on_test_batch_end", "on_predict_start", "on_predict_batch_end",
    "on_sanity_check_start", "on_sanity_check_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step",
]  # fmt: skip


class Rows(IterableDataset[torch.Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(1)))


def plain(value: Any) -> Any:
    """The value as JSON, numbers in six digits."""
    if isinstance(value, torch.Tensor):
        value = value.detach().double().sum().item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value else "nan"
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in sorted(value.items())}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


class Keeps(Logger):
    name, version = "keeps", 0

    def __init__(self, rows: dict[str, Any]) -> None:
        super().__init__()
        self.rows = rows

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        for name, value in metrics.items():
            if name != "epoch":  # of an evaluation's values per step: only here
                self.rows.setdefault(f"{name} at {step}", []).append(plain(value))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.rows.setdefault("hyperparameters", []).append(plain(dict(params)))


class Draw(random.Random):
    """What one program consists of."""

    def loader(self, trains: bool) -> Any:
        samples, batch_size = self.randint(2, 12), self.randint(1, 4)
        if not trains and self.random() < 0.2:
            return DataLoader(Rows(samples), batch_size)
        numbers = torch.randn(samples, 4, generator=torch.Generator().manual_seed(self.randint(0, 99)))
        shuffles = trains and self.random() < 0.3
        return DataLoader(numbers, batch_size, shuffle=shuffles, drop_last=samples > 4 and self.random() < 0.2)  # type: ignore[arg-type]

    def loaders(self, trains: bool) -> Any:
        kind = self.choice(["one", "one", "list", "dictionary", "nested", "combined"])
        one, other = self.loader(trains), self.loader(trains)
        if kind in ("one", "list"):
            return one if kind == "one" else [one, other]
        if kind == "nested" and trains:
            return {"a": [one, other], "b": self.loader(trains)}
        if kind == "combined" and trains:
            return CombinedLoader({"a": one, "b": other}, self.choice(["min_size", "max_size_cycle", "max_size"]))
        return {"a": one, "b": other}

    def trainer_arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"max_epochs": self.randint(1, 3)}
        for name, values in {
            "max_steps": [3, 7], "min_epochs": [2], "limit_train_batches": [1, 3, 1.0], "limit_val_batches": [0, 1, 2],
            "num_sanity_val_steps": [0, 1, -1], "val_check_interval": [0.5, 1.0], "check_val_every_n_epoch": [2],
            "accumulate_grad_batches": [2, 3], "gradient_clip_val": [0.01, 0.5], "log_every_n_steps": [1, 2, 3],
        }.items():  # fmt: skip
            if self.random() < 0.25:
                found[name] = self.choice(values)
        return found

    def log_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.random() < 0.5:
            options["on_step"], options["on_epoch"] = self.choice([(True, False), (True, True), (False, True)])
        if self.random() < 0.3:
            options["reduce_fx"] = self.choice(["sum", "min", "max"])
        if self.random() < 0.2:
            options["batch_size"] = self.randint(1, 5)
        return options

    def callbacks(self) -> list[Any]:
        found: list[Any] = [LearningRateMonitor()] if self.random() < 0.4 else []
        for filename in self.sample(["{epoch}-{step}", "{step}-{train_loss:.3f}", "fixed"], self.randint(0, 1)):
            top, mode, every = self.choice([-1, 1, 2]), self.choice(["min", "max"]), len(filename) % 2 + 1
            checkpoint = ModelCheckpoint(monitor="train_loss", filename=filename, save_top_k=top, mode=mode)
            found.append(checkpoint if every == 1 else ModelCheckpoint(filename=filename, every_n_epochs=every))
        if self.random() < 0.3:
            found.append(EarlyStopping("train_loss", patience=self.randint(0, 1), mode=self.choice(["min", "max"])))
        return found


class Net(pl.LightningModule):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.save_hyperparameters({"seed": draw.randint(0, 9)})
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(draw.choice([0.0, 0.2])), nn.Linear(3, 1))
        self.kind = draw.choice(["single", "list", "dictionary", "step", "plateau", "by hand"])
        self.automatic_optimization = self.kind != "by hand"
        self.options = [draw.log_options() for _ in range(3)]

    def loss(self, batch: Any) -> torch.Tensor:
        if batch is None:  # of a loader that has ended, in "max_size"
            return self.net(torch.ones(1, 4)).pow(2).mean()
        if isinstance(batch, torch.Tensor):
            return self.net(batch).pow(2).mean() + (self.net(batch) - 1).abs().mean()
        parts = batch.values() if isinstance(batch, dict) else batch
        return sum(map(self.loss, parts)) / len(parts)  # type: ignore[return-value]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, batch_size=2)
        self.log("number", batch_idx % 3, **self.options[0] | {"batch_size": 1})
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), **self.options[1])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch), **self.options[2])

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        if self.kind in ("single", "by hand"):
            return optimizer
        if self.kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        if self.kind == "list":
            return [optimizer], [scheduler]
        per = {"scheduler": scheduler, "interval": "step" if self.kind == "step" else "epoch", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": per}


def seen(trainer: Any, module: Any, hook: str) -> dict[str, Any]:
    """What a hook finds in the Trainer."""
    found = {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "stage": trainer.state.stage and trainer.state.stage.value,
        "trains": module.training,
        "weights": plain(sum(map(torch.sum, module.parameters()))),
    }
    if hook.endswith("epoch_end") and not trainer.sanity_checking:
        found["callback_metrics"] = plain(trainer.callback_metrics)
    if "train_batch" in hook:
        found["is_last_batch"], found["batches"] = trainer.is_last_batch, trainer.num_training_batches
    return found


def watcher(trace: Trace) -> Any:
    def make(hook: str) -> Any:
        def call(self: Any, trainer: Any, module: Any, *arguments: Any, stage: str = "") -> None:
            batch_idx = arguments[-1] if "batch_start" in hook or "batch_end" in hook else None
            trace.append([hook, batch_idx, seen(trainer, module, hook)])

        return call

    return type("Watcher", (Callback,), {hook: make(hook) for hook in HOOKS})()


def run(seed: int) -> Any:
    draw, trace, rows = Draw(seed), Trace(), {}
    torch.manual_seed(seed)
    model, arguments = Net(draw), draw.trainer_arguments()
    if not model.automatic_optimization:
        arguments = {name: value for name, value in arguments.items() if name[:2] not in ("ac", "gr")}
    validates = draw.random() < 0.8 and arguments.get("limit_val_batches") != 0
    if not validates:
        arguments.pop("check_val_every_n_epoch", None)  # without a validation, ModelCheckpoint would save nothing there
    logger, callbacks = Keeps(rows), draw.callbacks()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False, logger=logger,
            default_root_dir=folder, callbacks=[watcher(trace), *callbacks], **arguments,
        )  # fmt: skip
        results = []
        try:
            trainer.fit(model, draw.loaders(True), draw.loaders(False) if validates else None)
            results.append(trainer.test(model, draw.loaders(False), verbose=False))
            results.append(trainer.predict(model, draw.loader(False)))
        except MisconfigurationException:  # drivetrain's errors are of this class there
            results.append("refused")
        files = sorted(
            os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names
        )
    best = [os.path.basename(each.best_model_path) for each in trainer.checkpoint_callbacks]
    logged = plain(dict(trainer.logged_metrics))
    return {"seed": seed, "trace": trace, "rows": rows, "results": plain(results), "files": files, "best": best,
            "logged": logged, "draws": plain(torch.rand(()))}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "drivetrain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(json.dumps([run(seed) for seed in range(int(sys.argv[1]), int(sys.argv[2]))]))
