"""Forecasts of monthly demand with pytorch-forecasting, as one of its users writes them; the numbers are printed as
JSON.

``pytorch_forecasting_models.py FOLDER [SEED [MODEL ...]]`` writes its logs and checkpoints below ``FOLDER``.
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
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from pytorch_forecasting import DeepAR, GroupNormalizer, NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.timeseries import TimeSeries
from pytorch_forecasting.metrics import MAE, RMSE, SMAPE, NormalDistributionLoss, QuantileLoss
from pytorch_forecasting.models.temporal_fusion_transformer._tft_pkg_v2 import TFT_pkg_v2

HORIZON_MONTHS = 4
MODELS = ("transformer", "deepar", "nbeats", "package")


def demand(seed: int, products: int = 8, months: int = 60) -> pd.DataFrame:
    """Monthly demand of some products, with a price that is known beforehand."""
    generator = np.random.default_rng(seed)
    month = np.arange(months)
    frames = []
    for product in range(products):
        price = generator.uniform(1, 2, months)
        wave = generator.uniform(2, 4) * np.sin(2 * np.pi * (month + generator.integers(12)) / 12)
        noise = generator.normal(0, 0.5, months)
        columns = {
            "month": month,
            "product": f"product{product}",
            "colour": "green" if product % 2 else "red",
            "season": (month % 12).astype(str),
            "price": price,
            "demand": 20 + 2 * product + 0.1 * month + wave - 3 * price + noise,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def datasets(frame: pd.DataFrame, **covariates: Any) -> tuple[TimeSeriesDataSet, TimeSeriesDataSet]:
    """The months that are learned, and the last ones of each product, which are to be forecast."""
    learned = TimeSeriesDataSet(
        frame[frame["month"] < frame["month"].max() - HORIZON_MONTHS],
        time_idx="month",
        target="demand",
        group_ids=["product"],
        min_encoder_length=12,
        max_encoder_length=12,
        min_prediction_length=HORIZON_MONTHS,
        max_prediction_length=HORIZON_MONTHS,
        time_varying_unknown_reals=["demand"],
        target_normalizer=GroupNormalizer(groups=["product"]),
        **covariates,
    )
    return learned, TimeSeriesDataSet.from_dataset(learned, frame, predict=True, stop_randomization=True)


class Comparison:
    """Models, all small, that are trained on the same demand."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.frame = demand(seed)
        self.last = ""  # checkpoint of the training that was last
        self.quiet: dict[str, Any] = {
            "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "default_root_dir": folder
        }  # fmt: skip

    def transformer(self) -> dict[str, Any]:
        """With covariates of every kind, and a learning rate that falls when validation gets no better."""
        learned, forecast = datasets(
            self.frame,
            static_categoricals=["product", "colour"],
            time_varying_known_categoricals=["season"],
            time_varying_known_reals=["month", "price"],
            add_relative_time_idx=True,
            add_target_scales=True,
            add_encoder_length=True,
        )
        pl.seed_everything(self.seed, workers=True)
        model = TemporalFusionTransformer.from_dataset(
            learned, learning_rate=0.02, hidden_size=8, attention_head_size=2, hidden_continuous_size=4, dropout=0.2,
            loss=QuantileLoss([0.1, 0.5, 0.9]), optimizer="adamw", reduce_on_plateau_patience=0, weight_decay=1e-3,
        )  # fmt: skip
        return self.numbers(model, learned, forecast, CSVLogger(self.folder, name="transformer"))

    def deepar(self) -> dict[str, Any]:
        """It forecasts by drawing, and has a learning rate for each epoch."""
        learned, forecast = datasets(self.frame)
        pl.seed_everything(self.seed, workers=True)
        model = DeepAR.from_dataset(
            learned, learning_rate=[0.03, 0.02, 0.01], hidden_size=8, rnn_layers=2, dropout=0.1, optimizer="adam",
            loss=NormalDistributionLoss(), logging_metrics=[SMAPE(), RMSE()],
        )  # fmt: skip
        return self.numbers(model, learned, forecast, TensorBoardLogger(self.folder, name="deepar"))

    def nbeats(self) -> dict[str, Any]:
        """Nothing in it is random, so that it can be taken up again where nobody keeps the random state."""
        learned, forecast = datasets(self.frame)
        pl.seed_everything(self.seed, workers=True)
        model = NBeats.from_dataset(
            learned, learning_rate=0.01, widths=[16, 32], dropout=0.0, backcast_loss_ratio=0.1, optimizer="sgd",
            loss=MAE(), reduce_on_plateau_patience=1,
        )  # fmt: skip
        found = self.numbers(model, learned, forecast, CSVLogger(self.folder, name="nbeats"), shuffle=False)
        again = pl.Trainer(max_epochs=6, gradient_clip_val=0.1, enable_progress_bar=False, **self.quiet)
        again.fit(
            model,
            learned.to_dataloader(train=True, batch_size=32, num_workers=0, shuffle=False),
            forecast.to_dataloader(train=False, batch_size=5, num_workers=0),
            ckpt_path=self.last,
            weights_only=False,
        )
        return {**found, "taken up": [again.global_step, again.current_epoch, norm(model)]}

    def package(self) -> dict[str, Any]:
        """The library's next interface, which makes the data module, the model and the Trainer itself."""
        pl.seed_everything(self.seed, workers=True)
        frame = self.frame.assign(product=self.frame["product"].str[-1].astype(int)).drop(columns=["colour", "season"])
        series = TimeSeries(frame, time="month", target="demand", group=["product"], known=["month", "price"])
        package = TFT_pkg_v2(
            model_cfg={
                "loss": MAE(), "logging_metrics": [SMAPE()], "hidden_size": 8, "attention_head_size": 2, "dropout": 0.1,
                "optimizer": "adam", "lr_scheduler": "cosine_annealing", "lr_scheduler_params": {"T_max": 5},
            },
            trainer_cfg={
                "max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": self.folder,
                "logger": CSVLogger(self.folder, name="package"), "enable_model_summary": False,
            },
            datamodule_cfg={
                "max_encoder_length": 12, "max_prediction_length": HORIZON_MONTHS, "batch_size": 32,
                "train_val_test_split": (0.5, 0.25, 0.25),
            },
        )  # fmt: skip
        best = package.fit(series, ckpt_dir=self.folder / "package")
        loaded = TFT_pkg_v2(ckpt_path=str(best), datamodule_cfg=package.datamodule_cfg)
        forecast = loaded.predict(
            series, mode="prediction", trainer_kwargs={**self.quiet, "enable_progress_bar": False}
        )
        return {
            "fitted": metrics(package.trainer),
            "best": best.name,
            "weights": [norm(package.model), norm(loaded.model)],
            "forecast": float(forecast["prediction"].double().sum()),
        }

    def numbers(self, model: Any, learned: Any, forecast: Any, logger: Any, shuffle: bool = True) -> dict[str, Any]:
        """Train ``model``, load the best of its states again, judge it and forecast with it."""
        training = learned.to_dataloader(train=True, batch_size=32, num_workers=0, shuffle=shuffle)
        validation = forecast.to_dataloader(train=False, batch_size=5, num_workers=0)
        stopping = EarlyStopping("val_loss", min_delta=1e-4, patience=2, mode="min")
        saving = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.3f}")
        trainer = pl.Trainer(
            max_epochs=4,
            accelerator="cpu",
            gradient_clip_val=0.1,
            limit_train_batches=7,
            log_every_n_steps=2,
            callbacks=[stopping, LearningRateMonitor(logging_interval="step"), saving],
            logger=logger,
            default_root_dir=self.folder,
            enable_progress_bar=False,
        )
        trainer.fit(model, train_dataloaders=training, val_dataloaders=validation)
        fitted = metrics(trainer)
        self.last = saving.last_model_path

        best = type(model).load_from_checkpoint(saving.best_model_path)
        (judged,) = trainer.validate(best, validation, verbose=False)
        (tested,) = trainer.test(best, validation, verbose=False)
        pl.seed_everything(self.seed)
        predicted = best.predict(
            validation, mode="prediction", return_y=True, return_index=True, trainer_kwargs=dict(self.quiet)
        )
        raw = best.predict(validation, mode="raw", trainer_kwargs=dict(self.quiet))
        (self.folder / logger.name).mkdir(exist_ok=True)
        best.predict(
            validation, mode="quantiles", output_dir=self.folder / logger.name, trainer_kwargs=dict(self.quiet)
        )
        written = torch.load(self.folder / logger.name / "predictions_0.pt", weights_only=False)
        return {
            "fitted": fitted,
            "judged": judged,
            "tested": tested,
            "ended": [trainer.global_step, trainer.current_epoch, stopping.stopped_epoch, stopping.wait_count],
            "best": Path(saving.best_model_path).name,
            "kept": {Path(path).name: float(score) for path, score in saving.best_k_models.items()},
            "weights": [norm(model), norm(best)],
            "hparams": sorted(best.hparams),
            "loss": repr(best.loss),
            "forecast": float(predicted.output.double().sum()),
            "error": float(MAE()(predicted.output, predicted.y)),
            "index": predicted.index.to_dict("list"),
            "raw": float(raw["prediction"].double().norm()),
            "written": float(written.output.double().sum()),
        }


def metrics(trainer: Any) -> dict[str, float]:
    return {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}


def norm(model: torch.nn.Module) -> float:
    return sum(float(weight.detach().double().norm()) for weight in model.parameters())


def main(folder: Path, seed: str = "7", *names: str) -> None:
    comparison = Comparison(folder, int(seed))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        numbers = {name: getattr(comparison, name)() for name in names or MODELS}
    messages = sorted({str(warning.message) for warning in warned})
    print(json.dumps({"trainer": pl.Trainer.__module__, "numbers": numbers, "warnings": messages}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
