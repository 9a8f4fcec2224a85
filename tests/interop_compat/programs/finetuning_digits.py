"""Layers of a small classifier, thawed phase by phase with finetuning-scheduler, as its documentation does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint, FTSEarlyStopping
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from outcome import ended, metrics, norm, report
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self, rate: float = 0.3, schedule: str = "step") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24)
        self.body = nn.Linear(24, 24)
        self.head = nn.Linear(24, 4)
        self.no_decay = ["bias"]

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.stem(image)))
        found: torch.Tensor = self.head(torch.relu(self.body(hidden)))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        image, kind = batch
        loss = functional.cross_entropy(self(image), kind)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        image, kind = batch
        scores = self(image)
        self.log("val_loss", functional.cross_entropy(scores, kind), prog_bar=True)
        self.log("val_acc", (scores.argmax(1) == kind).float().mean())

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=self.hparams["rate"], momentum=0.9, weight_decay=0.01)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
        if self.hparams["schedule"] == "lambda":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        if self.hparams["schedule"] == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]


class Phases(pl.Callback):
    """Writes down what each epoch trains."""

    def __init__(self) -> None:
        self.epochs: list[Any] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (tuner,) = (each for each in trainer.callbacks if isinstance(each, FinetuningScheduler))
        (optimizer,) = trainer.optimizers
        thawed = [name for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
        groups = [[float(group["lr"]), len(group["params"])] for group in optimizer.param_groups]
        self.epochs.append([trainer.current_epoch, tuner.curr_depth, thawed, groups, type(optimizer).__name__])


def loaders(seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Blurred patterns of four kinds."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(4, 16, generator=generator)
    kinds = torch.randint(4, (160,), generator=generator)
    images = patterns[kinds] + 2.5 * torch.randn(160, 16, generator=generator)
    train, val = TensorDataset(images[:64], kinds[:64]), TensorDataset(images[64:], kinds[64:])
    return DataLoader(train, batch_size=16), DataLoader(val, batch_size=32)


def trained(
    folder: Path, seed: int, *callbacks: pl.Callback, max_epochs: int, start: Path | None = None, **options: Any
) -> tuple[pl.Trainer, dict[str, Any]]:
    """Train a classifier, on from ``start`` if it is given; return the trainer and what there is to compare."""
    pl.seed_everything(seed)
    model, phases = Classifier(**options), Phases()
    trainer = pl.Trainer(
        default_root_dir=folder, max_epochs=max_epochs, accelerator="cpu", devices=1, log_every_n_steps=1,
        logger=CSVLogger(folder), enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, phases],
    )  # fmt: skip
    if start is not None:
        trainer.ckpt_path = start  # FinetuningScheduler asks for it in its setup; Lightning knows what fit gets later
    trainer.fit(model, *loaders(seed))
    saver: Any = trainer.checkpoint_callback
    scores = {Path(path).name: float(score) for path, score in sorted(saver.best_k_models.items())}
    found = {
        "epochs": phases.epochs,
        "ended": ended(trainer),
        "metrics": metrics(trainer),
        "weights": norm(model),
        "files": scores,
        "depths": [saver.current_ckpt_depth, saver.best_ckpt_depth],
        "callbacks": [type(each).__name__ for each in trainer.callbacks if type(each).__name__.startswith("FTS")],
    }
    judge = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (best,) = judge.validate(model, loaders(seed)[1], ckpt_path=saver.best_model_path, verbose=False)
    return trainer, {**found, "best": [Path(saver.best_model_path).name, best["val_loss"]]}


PHASES = {
    0: {"params": ["head.*"], "lr": 0.3},
    1: {"params": ["body.*"], "lr": 0.2},
    2: {"params": ["stem.*", "norm.*"], "lr": 0.1, "max_transition_epoch": 30},
}
"""Three phases, which end when the loss no longer falls."""


def explicit(folder: Path, seed: int) -> dict[str, Any]:
    """A schedule of three phases; then once more from a checkpoint of the second."""

    def callbacks() -> list[pl.Callback]:
        return [
            FinetuningScheduler(ft_schedule={depth: dict(phase) for depth, phase in PHASES.items()}),
            FTSEarlyStopping(monitor="val_loss", patience=1, min_delta=0.001),
            FTSCheckpoint(monitor="val_loss", save_top_k=-1, save_last=True, dirpath=folder / "checkpoints"),
            LearningRateMonitor("epoch"),
        ]

    trainer, first = trained(folder, seed, *callbacks(), max_epochs=30)
    saver: Any = trainer.checkpoint_callback
    second = max(epoch for epoch, depth, *_ in first["epochs"] if depth == 1)
    (start,) = (path for path in saver.best_k_models if f"epoch={second}-" in path)
    tuner = next(each for each in trainer.callbacks if isinstance(each, FinetuningScheduler))
    written = (Path(str(tuner.log_dir)) / "Classifier_ft_schedule.yaml").read_text()
    _, resumed = trained(folder, seed, *callbacks(), max_epochs=40, start=Path(start))
    resumed["metrics"].pop("lr-SGD", None)  # of the first epochs: only drivetrain's checkpoints hold logged values
    return {"whole": first, "from": Path(start).name, "resumed": resumed, "schedule": written}


def implicit(folder: Path, seed: int) -> dict[str, Any]:
    """A schedule that the library writes itself, with a new scheduler in each phase and callbacks that it adds."""
    scheduler = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.9}}
    again = {
        "lr_scheduler_init": scheduler,
        "pl_lrs_cfg": {"interval": "epoch", "frequency": 1, "name": "again"},
        "use_current_optimizer_pg_lrs": True,
    }
    tuner = FinetuningScheduler(base_max_lr=0.1, reinit_lr_cfg=again, max_depth=2)
    return trained(folder, seed, tuner, LearningRateMonitor("epoch"), max_epochs=40)[1]


def by_epochs(folder: Path, seed: int) -> dict[str, Any]:
    """Phases that end at given epochs; the best weights are not restored."""
    schedule = {depth: {**phase, "max_transition_epoch": 2 * depth + 2} for depth, phase in PHASES.items()}
    tuner = FinetuningScheduler(
        ft_schedule=schedule, epoch_transitions_only=True, restore_best=False, apply_lambdas_new_pgs=True
    )
    saver = FTSCheckpoint(monitor="val_loss", save_top_k=1)
    return trained(folder, seed, tuner, saver, max_epochs=6, schedule="lambda")[1]


def optimizers(folder: Path, seed: int) -> dict[str, Any]:
    """Phases of which each has an optimizer and a scheduler of its own."""
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}}
    rmsprop = {"class_path": "torch.optim.RMSprop", "init_args": {"lr": 0.003}}
    scheduler = {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.9}}
    later = {"new_lr_scheduler": {"lr_scheduler_init": scheduler, "pl_lrs_cfg": {"interval": "step", "frequency": 2}}}
    schedule: dict[int, Any] = {depth: dict(phase) for depth, phase in PHASES.items()}
    schedule[1] |= {"new_optimizer": {"optimizer_init": adam}, **later}
    schedule[2] |= {"new_optimizer": {"optimizer_init": rmsprop}, **later}
    tuner = FinetuningScheduler(ft_schedule=schedule)
    stopping = FTSEarlyStopping(monitor="val_loss", patience=1)
    saver = FTSCheckpoint(monitor="val_loss", save_top_k=2)
    return trained(folder, seed, tuner, stopping, saver, max_epochs=30)[1]


def plateau(folder: Path, seed: int) -> dict[str, Any]:
    """A scheduler that watches the loss, and callbacks that the library puts in the place of the usual ones."""
    usual = [
        pl.callbacks.EarlyStopping("val_acc", mode="max", patience=1),
        pl.callbacks.ModelCheckpoint(monitor="val_acc", mode="max", save_top_k=2),
    ]
    tuner = FinetuningScheduler(ft_schedule={depth: dict(phase) for depth, phase in PHASES.items()}, max_depth=1)
    return trained(folder, seed, tuner, *usual, max_epochs=30, schedule="plateau")[1]


if __name__ == "__main__":
    report(explicit=explicit, implicit=implicit, by_epochs=by_epochs, optimizers=optimizers, plateau=plateau)
