"""Forecasts of daily visitors with NeuralProphet, as one of its users writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import pytorch_lightning.core.saving as saving
from neuralprophet import NeuralProphet, set_random_seed
from neuralprophet.time_net import TimeNet
from outcome import ended, metrics, norm, report

# The library is older than these packages. It uses names that numpy and Lightning have removed; and Lightning reads its
# checkpoints only if it may load more than weights, and writes its hyperparameters only where there is no OmegaConf.
np.NaN = np.nan
pl.callbacks.ProgressBarBase = pl.callbacks.ProgressBar
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
saving._OMEGACONF_AVAILABLE = False


def visitors(seed: int, parks: int, days: int = 120) -> pd.DataFrame:
    """Daily visitors of some parks: a level, a trend that turns, a weekly wave, weather and noise."""
    generator = np.random.default_rng(seed)
    day = np.arange(days)
    frames = []
    for park in range(parks):
        weather = generator.normal(0, 1, days)
        wave = 3 * np.sin(2 * np.pi * (day + park) / 7)
        trend = 0.1 * day - 0.15 * np.maximum(day - 70, 0)
        values = 20 + 2 * park + trend + wave + np.roll(weather, 1) + generator.normal(0, 0.4, days)
        dates = pd.date_range("2023-11-01", periods=days, freq="D")
        frames.append(pd.DataFrame({"ID": f"park{park}", "ds": dates, "y": values, "weather": weather}))
    return pd.concat(frames, ignore_index=True)


class Seeds(pl.Callback):
    """Seeds each training: Lightning's search for a learning rate has drawn random numbers before, and ours has not."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        set_random_seed(self.seed)


def numbers(model: NeuralProphet, history: pd.DataFrame, test: pd.DataFrame, seed: int, **fit: Any) -> dict[str, Any]:
    set_random_seed(seed)
    logged = model.fit(history, freq="D", **fit)
    fitted = {"metrics": metrics(model.trainer), "ended": ended(model.trainer)}
    trained = model.trainer.lightning_module
    if best := model.metrics_logger.checkpoint_path:
        # The library does so where the callback's current_score is not the best, which it always is on Lightning.
        model.model = TimeNet.load_from_checkpoint(best)
        model.model.train_loader = trained.train_loader  # of which Lightning asks for the steps, in a test too
    if (bar := model.trainer.progress_bar_callback) is not None:
        bar.main_progress_bar.close()  # else it is closed, and shown once more, when the program ends
    tested = model.test(test, verbose=False)
    forecast = model.predict(test).select_dtypes("number")
    return {
        **fitted,
        "logged": {name: [float(value) for value in values] for name, values in logged.items()},
        "rate": float(trained.learning_rate),
        "weights": norm(model.model),
        "tested": {name: float(value) for name, value in tested.iloc[0].items()},
        "forecast": {name: float(values.sum()) for name, values in forecast.items()},
        "best": Path(best or "").name,
    }


def options(*callbacks: pl.Callback) -> dict[str, Any]:
    return {"accelerator": "cpu", "trainer_config": {"callbacks": list(callbacks)}}


def seasons(folder: Path, seed: int) -> dict[str, Any]:
    """Its learning rate is found, a bar shows the epochs, and the best of its states is loaded."""
    frame = visitors(seed, parks=1)[["ds", "y"]]
    model = NeuralProphet(n_changepoints=0, seasonality_reg=1.0, epochs=20, batch_size=8, **options(Seeds(seed)))
    return numbers(model, frame[:90], frame[90:], seed, checkpointing=True)


def lags(folder: Path, seed: int) -> dict[str, Any]:
    """Several parks and their weather, with quantiles and holidays; it stops early."""
    stopping = pl.callbacks.EarlyStopping("Loss_val", patience=1)
    model = NeuralProphet(
        n_lags=7, n_forecasts=3, ar_layers=[8], lagged_reg_layers=[4], quantiles=[0.1, 0.9], learning_rate=0.02,
        trend_global_local="local", epochs=6, batch_size=32, **options(stopping),
    )  # fmt: skip
    model.add_lagged_regressor("weather").add_country_holidays("US")
    history, test = model.split_df(visitors(seed, parks=3), freq="D", valid_p=0.25)
    return numbers(model, history, test, seed, validation_df=test, early_stopping=True, progress=None)


if __name__ == "__main__":
    report(seasons=seasons, lags=lags)
