"""Data in the formats that the examples read: small, made here, and of no meaning."""

from __future__ import annotations

import importlib.util
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np


def make(folder: Path) -> None:
    """Write all stand-ins into ``folder``, which is where ``DRIVETRAIN_STAND_INS`` points."""
    make_mnist(folder / "MNIST" / "raw")
    for split in ("train", "val"):
        make_pictures(folder / "imagenet" / split, ("cat", "dog"), each=4)
    make_kitti(folder / "kitti" / "training")
    for split in ("train", "validation"):
        make_pictures(folder / "cats_and_dogs_filtered" / split, ("cats", "dogs"), each=4)
    make_archive(folder / "cats_and_dogs_filtered", folder / "downloads" / "cats_and_dogs_filtered.zip")
    if importlib.util.find_spec("torchvision") is not None:
        make_weights(folder / "torch" / "hub" / "checkpoints")


def make_mnist(folder: Path) -> None:
    """Digits; as many as there are, because examples split them into 55,000 and 5,000."""
    folder.mkdir(parents=True)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.int64) % 10
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = struct.pack(">II", 0x801, count)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


def make_pictures(folder: Path, classes: tuple[str, ...], each: int) -> None:
    """A folder of pictures for each class."""
    from PIL import Image

    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            Image.new("RGB", (64, 48), (number * 100, index * 10, 50)).save(folder / name / f"{index}.jpg")


def make_kitti(folder: Path) -> None:
    """Streets, and for each pixel what it shows."""
    from PIL import Image

    for name, mode in (("image_2", "RGB"), ("semantic", "L")):
        (folder / name).mkdir(parents=True)
        for index in range(5):
            Image.new(mode, (128, 64), 7 if mode == "L" else (index, 9, 9)).save(folder / name / f"{index}.png")


def make_archive(folder: Path, archive: Path) -> None:
    """Put ``folder`` into a zip file."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*.jpg")):
            file.write(path, path.relative_to(folder.parent))


def make_weights(folder: Path) -> None:
    """Weights of a ResNet where torch looks for those that it has downloaded before."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was compiled for GPUs, and says that it cannot load that part
        from torchvision import models

    folder.mkdir(parents=True)
    name = models.ResNet50_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    torch.save(models.resnet50().state_dict(), folder / name)
