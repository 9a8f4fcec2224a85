"""A program as a user of Lightning writes it, which prints exact numbers; under Lightning and under drivetrain.compat.

The root of the imports is an argument: ``trainer_program.py lightning.pytorch`` or ``pytorch_lightning``.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

root = sys.argv[1]
pl: Any = importlib.import_module(root)
callbacks: Any = importlib.import_module(f"{root}.callbacks")
loggers: Any = importlib.import_module(f"{root}.loggers")
utilities: Any = importlib.import_module(f"{root}.utilities")


class Data(pl.LightningDataModule):  # type: ignore[misc]
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        self.train, self.val = random_split(data, [48, 16], torch.Generator().manual_seed(4))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    predict_dataloader = val_dataloader


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 16, lr: float = 0.02, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1))
        self.val_losses: list[list[float]] = []  # of each validation, by batch; all batches have the same size

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return {"loss": loss}

    def on_validation_epoch_start(self) -> None:
        self.val_losses += [] if self.trainer.sanity_checking else [[]]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log_dict({"val_loss": loss, "twice": 2.0})
        if not self.trainer.sanity_checking:
            self.val_losses[-1].append(float(loss))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(utilities.grad_norm(self, 2))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Seen(callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.epochs: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append([trainer.current_epoch, trainer.global_step, len(trainer.callback_metrics)])


def hexed(metrics: Any) -> dict[str, str]:
    return {name: float(value).hex() for name, value in sorted(metrics.items())}


def main() -> None:
    pl.seed_everything(7, workers=True)
    folder, seen = Path.cwd(), Seen()
    best = callbacks.ModelCheckpoint(folder / "kept", monitor="val_loss", save_top_k=2, filename="{epoch}-{step}")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[best, callbacks.EarlyStopping("val_loss", patience=2), callbacks.LearningRateMonitor("epoch"), seen],
        logger=loggers.CSVLogger(folder, name="log"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net, data = Net(), Data()
    trainer.fit(net, data)
    logged = Path(trainer.logger.log_dir, "metrics.csv").read_text(encoding="utf-8").splitlines()
    again = Net.load_from_checkpoint(best.best_model_path)
    predictions = trainer.predict(again, data)
    validated = trainer.validate(again, data, verbose=False)
    print(
        json.dumps(
            {
                "metrics": hexed(trainer.callback_metrics),
                "validated": [hexed(metrics) for metrics in validated],
                "val_losses": [*net.val_losses, *again.val_losses],
                "weights": hexed({name: value.double().sum() for name, value in net.state_dict().items()}),
                "best": [Path(best.best_model_path).name, float(best.best_model_score).hex()],
                "kept": sorted(path.name for path in (folder / "kept").iterdir()),
                "hparams": dict(again.hparams),
                "predictions": float(torch.cat(predictions).double().sum()).hex(),
                "epochs": seen.epochs,
                "columns": sorted(logged[0].split(",")),
                "state": [str(trainer.state.fn.value), trainer.current_epoch, trainer.global_step],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
