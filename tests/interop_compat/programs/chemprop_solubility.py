"""Solubility of small molecules with Chemprop, as its training notebook does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from chemprop import data, featurizers, models, nn
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from outcome import ended, metrics, norm, report
from rdkit import Chem
from rdkit.Chem import Crippen


def molecules(seed: int, count: int = 90) -> list[data.MoleculeDatapoint]:
    """Chains with rings, alcohols, amines and halogens; their logP with some noise."""
    generator = np.random.default_rng(seed)
    ends = ["O", "N", "Cl", "F", "C(=O)O", "c1ccccc1", "C#N", "C1CCCCC1"]
    points = []
    for _ in range(count):
        smiles = "".join(generator.choice(["C", "CC", "C(C)", "O", "N"], size=generator.integers(1, 5)))
        smiles = f"C{smiles}C{generator.choice(ends)}"
        value = Crippen.MolLogP(Chem.MolFromSmiles(smiles)) + generator.normal(0, 0.1)
        points.append(data.MoleculeDatapoint.from_smi(smiles, [value]))
    return points


def loaders(seed: int, featurizer: Any) -> tuple[Any, Any, Any, Any]:
    points = molecules(seed)
    train, val, test = (data.MoleculeDataset(part, featurizer) for part in (points[:60], points[60:75], points[75:]))
    scaler = train.normalize_targets()
    val.normalize_targets(scaler)
    return (
        scaler,
        data.build_dataloader(train, batch_size=16, seed=seed),
        data.build_dataloader(val, batch_size=16, shuffle=False),
        data.build_dataloader(test, batch_size=16, shuffle=False),
    )


def train(folder: Path, seed: int, message_passing: Any, predictor: type, predicted: int) -> dict[str, Any]:
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    scaler, training, validation, testing = loaders(seed, featurizer)
    pl.seed_everything(seed)
    model = models.MPNN(
        message_passing(d_h=24, depth=3, dropout=0.1),
        nn.MeanAggregation(),
        predictor(input_dim=24, hidden_dim=24, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)),
        batch_norm=True,
        metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
        warmup_epochs=1,
    )
    best = ModelCheckpoint(folder, "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min", save_last=True)
    trainer = pl.Trainer(
        logger=False,
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        enable_progress_bar=False,
        callbacks=[best, EarlyStopping("val_loss", patience=2)],
    )
    trainer.fit(model, training, validation)
    fitted = metrics(trainer)
    (tested,) = trainer.test(dataloaders=testing, weights_only=False)
    loaded = models.MPNN.load_from_checkpoint(best.best_model_path)
    with torch.inference_mode():
        predictions = torch.cat(
            pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False).predict(loaded, testing)
        )
    assert predictions.shape[-1] == predicted
    return {
        "fitted": fitted,
        "tested": tested,
        "ended": ended(trainer),
        "best": Path(best.best_model_path).name,
        "weights": [norm(model), norm(loaded)],
        "predictions": float(predictions.double().norm()),
    }


def bonds(folder: Path, seed: int) -> dict[str, Any]:
    """Messages along bonds, and one number for each molecule."""
    return train(folder, seed, nn.BondMessagePassing, nn.RegressionFFN, 1)


def atoms(folder: Path, seed: int) -> dict[str, Any]:
    """Messages between atoms, and a mean and a variance for each molecule."""
    return train(folder, seed, nn.AtomMessagePassing, nn.MveFFN, 2)


if __name__ == "__main__":
    report(bonds=bonds, atoms=atoms)
