"""Forecasts of hourly sales with GluonTS, as one of its users writes them; the numbers are printed as JSON.

``gluonts_forecasts.py FOLDER [SEED [ESTIMATOR ...]]`` writes its logs and checkpoints below ``FOLDER``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.dataset.split import split
from gluonts.evaluation import Evaluator
from gluonts.model.predictor import Predictor
from gluonts.torch import (
    DeepAREstimator,
    PatchTSTEstimator,
    SimpleFeedForwardEstimator,
    TemporalFusionTransformerEstimator,
    WaveNetEstimator,
)
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

HORIZON_HOURS = 12
ESTIMATORS = ("feed_forward", "deepar", "transformer", "patches", "wavenet")


def sales(seed: int, shops: int = 6, days: int = 14) -> PandasDataset:
    """Hourly sales of some shops: a level, a trend, a daily wave and noise."""
    generator = np.random.default_rng(seed)
    hours = np.arange(24 * days)
    index = pd.date_range("2024-01-01", periods=hours.size, freq="h")
    frames = {}
    for shop in range(shops):
        wave = generator.uniform(1, 3) * np.sin(2 * np.pi * (hours / 24 + generator.uniform()))
        values = 10 + shop + 0.01 * hours + wave + generator.normal(0, 0.3, hours.size)
        frames[f"shop{shop}"] = pd.DataFrame({"target": values.astype(np.float32)}, index=index)
    return PandasDataset(frames, target="target")


class Comparison:
    """Estimators, all small, that are trained on the same sales."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        series = sales(seed)
        self.history, self.test = split(series, offset=-2 * HORIZON_HOURS)
        self.past, _ = split(series, offset=-4 * HORIZON_HOURS)
        self.common: dict[str, Any] = {"prediction_length": HORIZON_HOURS, "context_length": 24, "batch_size": 16}

    def feed_forward(self, trainer: dict[str, Any], batches_per_step: int = 2) -> Any:
        """Its learning rate is so high that it stops early."""
        trainer = {**trainer, "accumulate_grad_batches": batches_per_step, "max_epochs": 9}
        return SimpleFeedForwardEstimator(
            hidden_dimensions=[16], lr=0.1, num_batches_per_epoch=10, trainer_kwargs=trainer, **self.common
        )

    def feed_forward_in_uneven_windows(self, trainer: dict[str, Any]) -> Any:
        """Each epoch's tenth batch is left alone in its window."""
        return self.feed_forward(trainer, batches_per_step=3)

    def deepar(self, trainer: dict[str, Any]) -> Any:
        return self.deepar_with_summary({**trainer, "enable_model_summary": False})

    def deepar_with_summary(self, trainer: dict[str, Any]) -> Any:
        """The table shows sizes, for which the model is run once; and it draws random numbers whenever it is run."""
        return DeepAREstimator(
            freq="h", hidden_size=12, dropout_rate=0.2, patience=0, lr=0.02, num_batches_per_epoch=8,
            num_parallel_samples=20, trainer_kwargs=trainer, **self.common,
        )  # fmt: skip

    def transformer(self, trainer: dict[str, Any]) -> Any:
        return TemporalFusionTransformerEstimator(
            freq="h", hidden_dim=8, variable_dim=8, num_heads=2, dropout_rate=0.1, num_batches_per_epoch=6,
            trainer_kwargs=trainer, **self.common,
        )  # fmt: skip

    def patches(self, trainer: dict[str, Any]) -> Any:
        return PatchTSTEstimator(
            patch_len=6, d_model=8, nhead=2, dim_feedforward=16, num_encoder_layers=1, dropout=0.1,
            num_batches_per_epoch=6, trainer_kwargs={**trainer, "precision": "bf16-mixed"}, **self.common,
        )  # fmt: skip

    def wavenet(self, trainer: dict[str, Any]) -> Any:
        """It sees no validation data."""
        return WaveNetEstimator(
            freq="h", prediction_length=HORIZON_HOURS, num_residual_channels=4, num_skip_channels=4, num_bins=32,
            batch_size=16, num_batches_per_epoch=6, num_parallel_samples=20,
            trainer_kwargs={**trainer, "max_steps": 15},
        )  # fmt: skip

    def numbers(self, name: str) -> dict[str, Any]:
        """Train an estimator, forecast with the best of its states, and judge the forecasts."""
        monitor = "train_loss" if name == "wavenet" else "val_loss"
        stopping = EarlyStopping(monitor, patience=2, min_delta=0.01)
        name_of = "{epoch}-{" + monitor + ":.4f}"
        best = ModelCheckpoint(filename=name_of, monitor=monitor, every_n_epochs=2, save_top_k=2, save_last=True)
        trainer = {
            "max_epochs": 4, "accelerator": "cpu", "gradient_clip_val": 0.5, "log_every_n_steps": 3,
            "enable_progress_bar": False, "logger": CSVLogger(self.folder, name=name),
            "callbacks": [stopping, best, LearningRateMonitor(logging_interval="epoch")],
        }  # fmt: skip
        estimator = getattr(self, name)(trainer)
        pl.seed_everything(self.seed, workers=True)
        judged = None if name == "wavenet" else self.history
        trained = estimator.train_model(self.past, judged, cache_data=True)

        (self.folder / f"{name}_predictor").mkdir()
        trained.predictor.serialize(self.folder / f"{name}_predictor")
        predictor = Predictor.deserialize(self.folder / f"{name}_predictor")
        instances = self.test.generate_instances(prediction_length=HORIZON_HOURS, windows=2)
        pl.seed_everything(self.seed)
        forecasts = list(predictor.predict(instances.input, num_samples=20))
        actual = [pd.concat([to_series(past), to_series(future)]) for past, future in instances]
        errors, _ = Evaluator(quantiles=[0.1, 0.5, 0.9], num_workers=0)(actual, forecasts)
        fitted = trained.trainer
        return {
            "metrics": {key: float(value) for key, value in sorted(fitted.callback_metrics.items())},
            "ended": [fitted.global_step, fitted.current_epoch, stopping.stopped_epoch, stopping.wait_count],
            "best": Path(best.best_model_path).name,
            "kept": {Path(path).name: float(score) for path, score in best.best_k_models.items()},
            "weights": sum(float(weight.detach().double().norm()) for weight in trained.trained_net.parameters()),
            "forecast": float(sum(forecast.mean.sum() for forecast in forecasts)),
            "errors": {key: float(errors[key]) for key in ("MASE", "RMSE", "mean_wQuantileLoss")},
            "log": logged(Path(fitted.logger.log_dir)),
        }


def to_series(entry: dict[str, Any]) -> pd.Series[Any]:
    target = entry["target"]
    return pd.Series(target, index=pd.period_range(entry["start"], periods=len(target), freq="h"))


def logged(folder: Path) -> list[dict[str, float]]:
    """What was logged, by step; which of it stands in one row of the file is the logger's affair."""
    rows: dict[int, dict[str, float]] = {}
    for row in pd.read_csv(folder / "metrics.csv").to_dict("records"):
        values = {key: value for key, value in row.items() if not pd.isna(value)}
        rows.setdefault(int(values["step"]), {}).update(values)
    return [dict(sorted(rows[step].items())) for step in sorted(rows)]


def main(folder: Path, seed: str = "7", *names: str) -> None:
    comparison = Comparison(folder, int(seed))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        numbers = {name: comparison.numbers(name) for name in names or ESTIMATORS}
    messages = sorted({str(warning.message) for warning in warned})
    print(json.dumps({"trainer": pl.Trainer.__module__, "numbers": numbers, "warnings": messages}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
