"""Scratched plates with anomalib: statistics of features, a normalizing flow, and networks against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Fastflow, Ganomaly, Padim
from anomalib.pre_processing import PreProcessor
from outcome import ended, metrics, norm, report
from PIL import Image
from torchvision.transforms.v2 import Resize

SIDE = 64


def plates(folder: Path, seed: int) -> Folder:
    """Draw grey plates: whole ones, and scratched ones with masks that show the scratches."""
    generator = np.random.default_rng(seed)
    for kind, count in (("whole", 16), ("scratched", 8)):
        for index in range(count):
            plate = generator.integers(100, 130, (SIDE, SIDE, 3)).astype(np.uint8)
            mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
            if kind == "scratched":
                top, left = generator.integers(4, SIDE - 24, 2)
                mask[top : top + 4, left : left + 20] = 255
                plate[mask > 0] = 250
                save(mask, folder / "masks" / f"{index}.png")
            save(plate, folder / kind / f"{index}.png")
    return Folder(
        "plates", "whole", folder, "scratched", mask_dir="masks", train_batch_size=4, eval_batch_size=4, num_workers=0,
        seed=seed,
    )  # fmt: skip


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def numbers(folder: Path, seed: int, make: Any, **arguments: Any) -> dict[str, Any]:
    data = plates(folder / "data", seed)
    pl.seed_everything(seed)
    model = make(pre_processor=PreProcessor(Resize((SIDE, SIDE))))
    engine = Engine(
        default_root_dir=folder, accelerator="cpu", devices=1, logger=True, log_every_n_steps=1,
        enable_progress_bar=False, **arguments,
    )  # fmt: skip
    engine.fit(model, datamodule=data)
    fitted, after = metrics(engine.trainer), ended(engine.trainer)
    (tested,) = engine.test(model, datamodule=data)
    predictions = engine.predict(model, datamodule=data)
    return {
        "fitted": fitted,
        "ended": after,
        "tested": dict(tested),
        "best": Path(engine.best_model_path or "").name,
        "weights": norm(model),
        "scores": float(sum(torch.as_tensor(batch.pred_score).double().sum() for batch in predictions)),
    }


def statistics(folder: Path, seed: int) -> dict[str, Any]:
    """One epoch without an optimizer, whose features are fitted when the first validation comes."""

    def make(**parts: Any) -> Padim:
        return Padim("resnet18", ["layer1", "layer2"], pre_trained=False, n_features=20, **parts)

    return numbers(folder, seed, make)


def flow(folder: Path, seed: int) -> dict[str, Any]:
    def make(**parts: Any) -> Fastflow:
        return Fastflow("resnet18", pre_trained=False, flow_steps=2, **parts)

    return numbers(folder, seed, make, max_epochs=2)


def networks(folder: Path, seed: int) -> dict[str, Any]:
    """Two optimizers by hand."""

    def make(**parts: Any) -> Ganomaly:
        return Ganomaly(batch_size=4, n_features=8, latent_vec_size=10, **parts)

    return numbers(folder, seed, make, max_epochs=2)


if __name__ == "__main__":
    report(statistics=statistics, flow=flow, networks=networks)
