"""Fields in satellite images with TorchGeo: segmentation of georeferenced rasters, and SimCLR on the same images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import rasterio
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from outcome import ended, metrics, norm, report
from torchgeo.datamodules import GeoDataModule
from torchgeo.datasets import RasterDataset, random_bbox_assignment
from torchgeo.samplers import GridGeoSampler, RandomBatchGeoSampler
from torchgeo.trainers import SemanticSegmentationTask, SimCLRTask


class Images(RasterDataset):
    filename_glob = "image_*.tif"


class Masks(RasterDataset):
    filename_glob = "mask_*.tif"
    is_image = False


class Fields(GeoDataModule):
    """Patches of 32 pixels, chosen by chance for training and in a grid for the rest."""

    mean, std = torch.zeros(3), torch.full((3,), 255.0)

    def __init__(self, paths: str, seed: int) -> None:
        super().__init__(Images, batch_size=4, patch_size=32, length=24, paths=paths)
        self.seed = seed

    def setup(self, stage: str) -> None:
        both = Images(**self.kwargs) & Masks(**self.kwargs)
        generator = torch.Generator().manual_seed(self.seed)
        parts = random_bbox_assignment(both, [0.6, 0.2, 0.2], generator)
        self.train_dataset, self.val_dataset, self.test_dataset = parts
        self.train_batch_sampler = RandomBatchGeoSampler(parts[0], self.patch_size, self.batch_size, self.length)
        self.val_sampler = GridGeoSampler(parts[1], self.patch_size, self.patch_size)
        self.test_sampler = GridGeoSampler(parts[2], self.patch_size, self.patch_size)


def paint(folder: Path, seed: int, count: int = 5, side: int = 96) -> str:
    """Write images of three bands with squares in them, side by side on the map, and masks that show the squares."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for index in range(count):
        mask = np.zeros((1, side, side), dtype=np.uint8)
        for top, left in generator.integers(0, side - 32, size=(4, 2)):
            mask[0, top : top + 32, left : left + 32] = 1
        image = (generator.integers(0, 120, (3, side, side)) + 100 * mask).astype(np.uint8)
        place = rasterio.transform.from_origin(500000 + 10 * side * index, 4000000, 10, 10)
        for name, values in (("image", image), ("mask", mask)):
            with rasterio.open(
                folder / f"{name}_{index}.tif", "w", driver="GTiff", height=side, width=side, count=len(values),
                dtype="uint8", crs="EPSG:32632", transform=place,
            ) as file:  # fmt: skip
                file.write(values)
    return str(folder)


def segmentation(folder: Path, seed: int) -> dict[str, Any]:
    data = Fields(paint(folder / "data", seed), seed)
    pl.seed_everything(seed)
    model = SemanticSegmentationTask(
        "unet", "resnet18", weights=None, in_channels=3, num_classes=2, loss="focal", lr=1e-3
    )
    best = ModelCheckpoint(folder, "best-{epoch}", "val_loss", save_last=True)
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=2, log_every_n_steps=2, enable_progress_bar=False,
        callbacks=[best, EarlyStopping("val_loss", patience=2)],
    )  # fmt: skip
    trainer.fit(model, data)
    fitted = metrics(trainer)
    (tested,) = trainer.test(model, data, ckpt_path="best", weights_only=False)
    loaded = SemanticSegmentationTask.load_from_checkpoint(best.best_model_path, weights_only=False)
    return {
        "fitted": fitted,
        "tested": tested,
        "ended": ended(trainer),
        "best": [Path(best.best_model_path).name, float(best.best_model_score or 0)],
        "weights": [norm(model), norm(loaded)],
    }


def contrast(folder: Path, seed: int) -> dict[str, Any]:
    """Without labels: LARS, warm-up and cosine, augmentations that draw random numbers in the step."""
    data = Fields(paint(folder / "data", seed), seed)
    pl.seed_everything(seed)
    model = SimCLRTask("resnet18", layers=3, hidden_dim=32, output_dim=16, lr=0.05, memory_bank_size=32, size=32)
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=2, log_every_n_steps=2, enable_progress_bar=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, data)
    return {"fitted": metrics(trainer), "ended": ended(trainer), "weights": norm(model)}


if __name__ == "__main__":
    report(segmentation=segmentation, contrast=contrast)
