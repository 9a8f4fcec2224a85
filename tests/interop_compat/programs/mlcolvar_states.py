"""Collective variables of molecular dynamics with mlcolvar, whose loader shuffles whenever it is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from mlcolvar.cvs import AutoEncoderCV, DeepLDA, RegressionCV, VariationalAutoEncoderCV
from mlcolvar.data import DictDataset, DictModule
from outcome import ended, metrics, norm, report


def states(seed: int, **more: Callable[[torch.Tensor], torch.Tensor]) -> DictDataset:
    generator = torch.Generator().manual_seed(seed)
    distances = torch.randn(200, 6, generator=generator) @ torch.randn(6, 6, generator=generator)
    return DictDataset({"data": distances, **{name: of(distances) for name, of in more.items()}})


def numbers(
    folder: Path, seed: int, make: Callable[[], Any], data: DictDataset, batch_size: int = 32, **arguments: Any
) -> dict[str, Any]:
    pl.seed_everything(seed)
    module, model = DictModule(data, lengths=[0.8, 0.2], batch_size=batch_size), make()
    trainer = pl.Trainer(
        default_root_dir=folder, max_epochs=4, accelerator="cpu", log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, **arguments,
    )  # fmt: skip
    trainer.fit(model, module)
    return {"metrics": metrics(trainer), "ended": ended(trainer), "weights": norm(model)}


def autoencoder(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, lambda: AutoEncoderCV([6, 8, 2]), states(seed))


def variational(folder: Path, seed: int) -> dict[str, Any]:
    return numbers(folder, seed, lambda: VariationalAutoEncoderCV(2, [6, 8]), states(seed), num_sanity_val_steps=0)


def discriminant(folder: Path, seed: int) -> dict[str, Any]:
    data = states(seed, labels=lambda x: (x[:, 0] > 0).float())
    return numbers(folder, seed, lambda: DeepLDA([6, 8, 2], n_states=2), data, batch_size=0)


def regression(folder: Path, seed: int) -> dict[str, Any]:
    data = states(seed, target=lambda x: x.square().sum(1, keepdim=True) / 10)
    return numbers(folder, seed, lambda: RegressionCV([6, 8, 1]), data, reload_dataloaders_every_n_epochs=2)


if __name__ == "__main__":
    report(autoencoder=autoencoder, variational=variational, discriminant=discriminant, regression=regression)
