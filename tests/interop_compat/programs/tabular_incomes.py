"""Incomes out of tables with PyTorch Tabular, as one of its users writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from outcome import ended, metrics, norm, report
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig, GANDALFConfig

# The library keeps its configuration in its files, and has not been adapted to torch's safe loading.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"


def people(seed: int, count: int = 240) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    age, hours = generator.uniform(18, 70, count), generator.normal(38, 8, count)
    trade = generator.choice(["baker", "nurse", "clerk"], count)
    income = 200 + 3 * age + 5 * hours + np.where(trade == "nurse", 80, 0) + generator.normal(0, 10, count)
    return pd.DataFrame(
        {"age": age, "hours": hours, "trade": trade, "income": income, "rich": (income > 560).astype(int)}
    )


def numbers(folder: Path, seed: int, model_config: Any, target: str, **of_trainer: Any) -> dict[str, Any]:
    frame = people(seed)
    train, val, test = frame[:160], frame[160:200], frame[200:]
    tabular = TabularModel(
        data_config=DataConfig(target=[target], continuous_cols=["age", "hours"], categorical_cols=["trade"]),
        model_config=model_config,
        optimizer_config=OptimizerConfig(
            optimizer="AdamW",
            lr_scheduler="ReduceLROnPlateau",
            lr_scheduler_params={"patience": 0, "factor": 0.5},
            lr_scheduler_monitor_metric="valid_loss",
        ),
        trainer_config=TrainerConfig(
            batch_size=32,
            max_epochs=4,
            accelerator="cpu",
            checkpoints_path=str(folder),
            seed=seed,
            progress_bar="none",
            load_best=True,
            early_stopping_patience=2,
            **of_trainer,
        ),
        verbose=False,
    )
    tabular.fit(train=train, validation=val, seed=seed)
    (tested,) = tabular.evaluate(test, verbose=False)
    tabular.save_model(str(folder / "saved"))
    predicted = TabularModel.load_model(str(folder / "saved")).predict(test)
    trainer = tabular.trainer
    return {
        "metrics": metrics(trainer),
        "ended": ended(trainer),
        "tested": tested,
        "weights": norm(tabular.model),
        "predicted": float(predicted.select_dtypes("number").abs().to_numpy().sum()),
    }


def embeddings(folder: Path, seed: int) -> dict[str, Any]:
    """A regression, with clipped and accumulated gradients."""
    config = CategoryEmbeddingModelConfig(task="regression", layers="16-8", dropout=0.1, learning_rate=0.05)
    return numbers(folder, seed, config, "income", gradient_clip_val=1.0, accumulate_grad_batches=2)


def transformer(folder: Path, seed: int) -> dict[str, Any]:
    config = FTTransformerConfig(
        task="classification", input_embed_dim=8, num_heads=2, num_attn_blocks=1, metrics=["accuracy", "f1_score"],
        metrics_params=[{}, {"num_classes": 2}], metrics_prob_input=[False, True],
    )  # fmt: skip
    return numbers(folder, seed, config, "rich")


def found_rate(folder: Path, seed: int) -> dict[str, Any]:
    """The learning rate is what a sweep suggests."""
    config = GANDALFConfig(task="classification", gflu_stages=2)
    return numbers(folder, seed, config, "rich", auto_lr_find=True)


if __name__ == "__main__":
    report(embeddings=embeddings, transformer=transformer, found_rate=found_rate)
