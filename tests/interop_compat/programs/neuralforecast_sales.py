"""Forecasts of monthly sales with NeuralForecast, as one of its users writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MAE, DistributionLoss
from neuralforecast.models import LSTM, MLP, NHITS
from outcome import ended, norm, report

HORIZON_MONTHS = 4


def sales(seed: int, shops: int = 5, months: int = 60) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    month = np.arange(months)
    frames = []
    for shop in range(shops):
        wave = 3 * np.sin(2 * np.pi * (month + generator.integers(12)) / 12)
        values = 20 + 2 * shop + 0.1 * month + wave + generator.normal(0, 0.5, months)
        dates = pd.date_range("2019-01-31", periods=months, freq="ME")
        frames.append(pd.DataFrame({"unique_id": f"shop{shop}", "ds": dates, "y": values}))
    return pd.concat(frames, ignore_index=True)


def numbers(folder: Path, model: Any, seed: int) -> dict[str, Any]:
    frame = sales(seed)
    forecasts = NeuralForecast(models=[model], freq="ME")
    forecasts.fit(frame, val_size=8)
    fitted = forecasts.models[0]
    forecasts.save(str(folder), overwrite=True, save_dataset=False)
    loaded = NeuralForecast.load(str(folder))
    predicted = [each.predict(frame).select_dtypes("number") for each in (forecasts, loaded)]
    return {
        "ended": ended(fitted.trainer) if hasattr(fitted, "trainer") else [],
        "losses": [[step, float(loss)] for step, loss in fitted.train_trajectories],
        "validated": [[step, float(loss)] for step, loss in fitted.valid_trajectories],
        "weights": [norm(fitted), norm(loaded.models[0])],
        "forecasts": [float(values.to_numpy().sum()) for values in predicted],
    }


def options(folder: Path, seed: int) -> dict[str, Any]:
    return {
        "h": HORIZON_MONTHS, "input_size": 12, "max_steps": 20, "val_check_steps": 5, "learning_rate": 0.01,
        "batch_size": 4, "windows_batch_size": 16, "random_seed": seed, "scaler_type": "standard", "accelerator": "cpu",
        "enable_progress_bar": False, "logger": False, "default_root_dir": str(folder), "enable_checkpointing": False,
    }  # fmt: skip


def perceptron(folder: Path, seed: int) -> dict[str, Any]:
    """It stops early."""
    model = MLP(hidden_size=16, loss=MAE(), early_stop_patience_steps=2, **options(folder, seed))
    return numbers(folder, model, seed)


def blocks(folder: Path, seed: int) -> dict[str, Any]:
    """Its learning rate falls twice, and gradients are clipped."""
    model = NHITS(
        mlp_units=3 * [[8, 8]], num_lr_decays=2, gradient_clip_val=0.5, dropout_prob_theta=0.1, **options(folder, seed)
    )
    return numbers(folder, model, seed)


def recurrent(folder: Path, seed: int) -> dict[str, Any]:
    """It forecasts a distribution."""
    loss = DistributionLoss("Normal", level=[80])
    model = LSTM(encoder_hidden_size=8, decoder_hidden_size=8, loss=loss, **options(folder, seed))
    return numbers(folder, model, seed)


if __name__ == "__main__":
    report(perceptron=perceptron, blocks=blocks, recurrent=recurrent)
