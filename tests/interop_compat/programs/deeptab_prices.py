"""Prices of houses with DeepTab, whose models are used as those of scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from deeptab.models import MLPClassifier, MLPRegressor, ResNetRegressor
from outcome import report


def houses(seed: int, count: int = 200) -> tuple[pd.DataFrame, np.ndarray]:
    generator = np.random.default_rng(seed)
    area, rooms = generator.uniform(40, 200, count), generator.integers(1, 7, count)
    town = generator.choice(["north", "south"], count)
    price = 2 * area + 10 * rooms + np.where(town == "south", 30, 0) + generator.normal(0, 5, count)
    return pd.DataFrame({"area": area, "rooms": rooms, "town": town}), (price - price.mean()) / price.std()


def numbers(folder: Path, seed: int, model: Any, classes: bool = False) -> dict[str, Any]:
    frame, price = houses(seed)
    target = (price > 0).astype(int) if classes else price
    pl.seed_everything(seed)
    model.fit(
        frame[:150], target[:150], X_val=frame[150:], y_val=target[150:], max_epochs=5, batch_size=32, lr=0.01,
        patience=2, lr_patience=1, random_state=seed, checkpoint_path=str(folder),
        accelerator="cpu", enable_progress_bar=False, logger=False,
    )  # fmt: skip
    predicted = model.predict_proba(frame[150:]) if classes else model.predict(frame[150:])
    return {
        "predicted": float(np.abs(predicted).sum()),
        "scores": {name: float(value) for name, value in sorted(model.evaluate(frame[150:], target[150:]).items())},
    }


def perceptron(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, MLPRegressor())


def residual(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, ResNetRegressor())


def classes(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, MLPClassifier(), classes=True)


if __name__ == "__main__":
    report(perceptron=perceptron, residual=residual, classes=classes)
