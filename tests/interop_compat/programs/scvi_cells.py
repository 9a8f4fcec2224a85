"""Gene expression of single cells with scvi-tools, as its tutorials do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import scvi
from outcome import ended, norm, report


def cells(seed: int, count: int = 160, genes: int = 40) -> anndata.AnnData:
    """Counts of cells of three types from two batches."""
    generator = np.random.default_rng(seed)
    kinds, batches = generator.integers(3, size=count), generator.integers(2, size=count)
    rates = generator.gamma(2, 1, (3, genes))[kinds] * (1 + 0.5 * batches[:, None])
    counts = generator.poisson(rates).astype(np.float32)
    labels = pd.DataFrame({"kind": [f"kind{kind}" for kind in kinds], "batch": batches.astype(str)})
    labels.index = [f"cell{number}" for number in range(count)]
    return anndata.AnnData(counts, obs=labels)


def numbers(model: Any, folder: Path, representation: Any) -> dict[str, Any]:
    model.save(str(folder / "model"), overwrite=True)
    loaded = type(model).load(str(folder / "model"), adata=model.adata, accelerator="cpu")
    history = {name: [float(value) for value in frame.iloc[:, 0]] for name, frame in model.history.items()}
    return {
        "history": dict(sorted(history.items())),
        "ended": ended(model.trainer),
        "weights": [norm(model.module), norm(loaded.module)],
        "cells": float(np.abs(representation(loaded)).sum()),
    }


def autoencoder(folder: Path, seed: int) -> dict[str, Any]:
    """Two batches in one space; it stops early, and its learning rate falls."""
    scvi.settings.seed = seed
    data = cells(seed)
    scvi.model.SCVI.setup_anndata(data, batch_key="batch")
    model = scvi.model.SCVI(data, n_hidden=16, n_latent=4)
    model.train(
        max_epochs=8, accelerator="cpu", batch_size=32, check_val_every_n_epoch=1, early_stopping=True,
        early_stopping_patience=2, enable_progress_bar=True, simple_progress_bar=False,
        plan_kwargs={"lr": 0.02, "reduce_lr_on_plateau": True, "lr_patience": 1, "n_epochs_kl_warmup": 4},
    )  # fmt: skip
    elbo = float(model.get_elbo())
    return {**numbers(model, folder, lambda found: found.get_latent_representation(give_mean=True)), "elbo": elbo}


def labels(folder: Path, seed: int) -> dict[str, Any]:
    """Types of cells, some of which are unknown, with the weights of an autoencoder to start from."""
    scvi.settings.seed = seed
    data = cells(seed)
    data.obs["known"] = data.obs["kind"].where(np.arange(data.n_obs) % 4 != 0, "unknown")
    scvi.model.SCVI.setup_anndata(data, batch_key="batch", labels_key="known")
    start = scvi.model.SCVI(data, n_hidden=16, n_latent=4)
    start.train(max_epochs=2, accelerator="cpu", batch_size=32, enable_progress_bar=False)
    model = scvi.model.SCANVI.from_scvi_model(start, "unknown")
    model.train(
        max_epochs=4, accelerator="cpu", devices="auto", batch_size=32, check_val_every_n_epoch=2,
        enable_progress_bar=False, gradient_clip_val=1.0,
    )  # fmt: skip
    return numbers(model, folder, lambda found: found.predict(soft=True).to_numpy())


def adversaries(folder: Path, seed: int) -> dict[str, Any]:
    """Genes and proteins: two optimizers, which train against each other."""
    scvi.settings.seed = seed
    data = cells(seed)
    generator = np.random.default_rng(seed)
    data.obsm["proteins"] = generator.poisson(5, (data.n_obs, 6)).astype(np.float32)
    scvi.model.TOTALVI.setup_anndata(data, batch_key="batch", protein_expression_obsm_key="proteins")
    model = scvi.model.TOTALVI(data, n_hidden=16, latent_distribution="normal", n_latent=4)
    model.train(
        max_epochs=3, accelerator="cpu", batch_size=32, enable_progress_bar=False, early_stopping=False,
        check_val_every_n_epoch=1,
    )  # fmt: skip
    return numbers(model, folder, lambda found: found.get_latent_representation())


if __name__ == "__main__":
    report(autoencoder=autoencoder, labels=labels, adversaries=adversaries)
