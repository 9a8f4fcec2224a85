"""Forecasts of daily temperatures with Darts, as one of its users writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from darts import TimeSeries
from darts.dataprocessing.transformers import Scaler
from darts.metrics import mae
from darts.models import NBEATSModel, NLinearModel, RNNModel, TCNModel
from darts.utils.callbacks import TFMProgressBar
from darts.utils.likelihood_models import GaussianLikelihood
from lightning_fabric.utilities.seed import seed_everything
from outcome import ended, metrics, norm, report
from pytorch_lightning.callbacks import Callback, EarlyStopping, LearningRateFinder
from torch.optim.lr_scheduler import ExponentialLR

HORIZON_DAYS = 7


class Losses(Callback):
    """Keeps the validation losses, as in the library's user guide."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["val_loss"]))


def temperatures(seed: int, days: int = 200) -> tuple[TimeSeries, TimeSeries]:
    generator = np.random.default_rng(seed)
    day = np.arange(days)
    values = 10 + 8 * np.sin(2 * np.pi * day / 50) + generator.normal(0, 0.5, days)
    series = TimeSeries.from_times_and_values(pd.date_range("2024-01-01", periods=days), values.astype(np.float32))
    train, test = series.split_after(0.85)
    scaler = Scaler()
    return scaler.fit_transform(train), scaler.transform(test)


def numbers(model: Any, losses: Losses, seed: int, folder: Path, name: str, **of_forecast: Any) -> dict[str, Any]:
    train, test = temperatures(seed)
    model.fit(train[:-40], val_series=train[-60:], verbose=False)
    trainer = model.trainer
    best = type(model).load_from_checkpoint(name, work_dir=str(folder), best=True, trusted=True)
    forecast = best.predict(HORIZON_DAYS, series=train, verbose=False, **of_forecast)
    back = best.historical_forecasts(
        train, start=0.9, forecast_horizon=HORIZON_DAYS, retrain=False, last_points_only=True, verbose=False
    )
    return {
        "metrics": metrics(trainer),
        "losses": losses.values,
        "ended": ended(trainer),
        "epochs": model.epochs_trained,
        "weights": [norm(model.model), norm(best.model)],
        "forecast": float(np.abs(forecast.all_values()).sum()),
        "error": float(mae(test, forecast)),
        "back": float(back.values().sum()),
    }


def common(folder: Path, seed: int, name: str, losses: Losses, **trainer: Any) -> dict[str, Any]:
    return {
        "n_epochs": 4,
        "batch_size": 16,
        "random_state": seed,
        "model_name": name,
        "work_dir": str(folder),
        "save_checkpoints": True,
        "force_reset": True,
        "pl_trainer_kwargs": {"accelerator": "cpu", "callbacks": [losses, TFMProgressBar()], **trainer},
    }


def linear(folder: Path, seed: int) -> dict[str, Any]:
    """With early stopping, gradient clipping, and a scheduler that is a class with its arguments."""
    losses = Losses()
    options = common(folder, seed, "linear", losses, gradient_clip_val=0.5)
    options["pl_trainer_kwargs"]["callbacks"].append(EarlyStopping("val_loss", patience=1, min_delta=0.05))
    model = NLinearModel(
        21, HORIZON_DAYS, lr_scheduler_cls=ExponentialLR, lr_scheduler_kwargs={"gamma": 0.8},
        optimizer_kwargs={"lr": 0.05}, **options,
    )  # fmt: skip
    return numbers(model, losses, seed, folder, "linear")


def blocks(folder: Path, seed: int) -> dict[str, Any]:
    """Double precision, and accumulated gradients."""
    losses = Losses()
    options = common(folder, seed, "blocks", losses, precision="64-true", accumulate_grad_batches=2)
    model = NBEATSModel(21, HORIZON_DAYS, num_stacks=2, num_blocks=1, layer_widths=16, dropout=0.1, **options)
    return numbers(model, losses, seed, folder, "blocks")


def recurrent(folder: Path, seed: int) -> dict[str, Any]:
    """It forecasts by drawing."""
    losses = Losses()
    options = common(folder, seed, "recurrent", losses)
    model = RNNModel(
        21, "LSTM", hidden_dim=8, dropout=0.1, training_length=28, likelihood=GaussianLikelihood(), **options
    )
    return numbers(model, losses, seed, folder, "recurrent", num_samples=20)


def convolutions(folder: Path, seed: int) -> dict[str, Any]:
    """Its learning rate is found beforehand, and training goes on from weights that were fitted."""
    train, _ = temperatures(seed)
    losses = Losses()
    options = common(folder, seed, "convolutions", losses)
    model = TCNModel(21, HORIZON_DAYS, num_filters=4, dropout=0.1, **options)
    seed_everything(seed)
    found = model.lr_find(train[:-40], val_series=train[-60:], num_training=20, verbose=False)
    again = NLinearModel(21, HORIZON_DAYS, **common(folder, seed, "again", Losses()))
    again.load_weights_from_checkpoint("linear", work_dir=str(folder.parent / "linear"), best=False, trusted=True)
    again.fit(train[:-40], val_series=train[-60:], epochs=2, verbose=False)
    rates = {"rate": float(found.suggestion()), "losses": [float(loss) for loss in found.results["loss"]]}
    return {**numbers(model, losses, seed, folder, "convolutions"), **rates, "again": norm(again.model)}


def finder(folder: Path, seed: int) -> dict[str, Any]:
    """A finder of learning rates among the callbacks."""
    losses = Losses()
    options = common(folder, seed, "finder", losses)
    options["pl_trainer_kwargs"]["callbacks"].append(LearningRateFinder(num_training_steps=15))
    return numbers(NLinearModel(21, HORIZON_DAYS, **options), losses, seed, folder, "finder")


if __name__ == "__main__":
    report(linear=linear, blocks=blocks, recurrent=recurrent, convolutions=convolutions)
