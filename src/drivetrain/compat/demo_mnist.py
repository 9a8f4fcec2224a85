"""Lightning's ``demos.mnist_datamodule``: handwritten digits."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split

from drivetrain.base.packages import torchvision
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import check_installed
from drivetrain.module.datamodule import LightningDataModule

_FOLDER = "./data"
_HOST = "https://pl-public-data.s3.amazonaws.com/MNIST/processed"


class _HostedMNIST(Dataset[tuple[Tensor, int]]):
    """MNIST without torchvision, read from two files of tensors.

    Args:
        root: the folder whose subfolder ``MNIST/complete`` has the files.
        train: True: the training images; False: the test images.
        normalize: the mean and the standard deviation with which to normalize pixels (0 to 255); ``None``: do not
            normalize.
        download: download missing files.
        kwargs: further arguments of torchvision's class, which are ignored.

    Raises:
        FileNotFoundError: a file is missing, and ``download`` is False.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        normalize: tuple[float, float] | None = (0.1307, 0.3081),
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        self.normalize = normalize
        folder = Path(root) / "MNIST" / "complete"
        for name in ("training.pt", "test.pt") if download else ():
            if not (folder / name).exists():
                folder.mkdir(parents=True, exist_ok=True)
                torch.hub.download_url_to_file(f"{_HOST}/{name}", str(folder / name), progress=False)
        self.data, self.targets = torch.load(folder / ("training.pt" if train else "test.pt"), weights_only=True)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image: Tensor = self.data[index].float().unsqueeze(0)
        if self.normalize is not None:
            mean, deviation = (torch.tensor(number) for number in self.normalize)
            image = (image - mean) / deviation
        return image, int(self.targets[index])

    def __len__(self) -> int:
        return len(self.data)


def MNIST(*args: Any, **kwargs: Any) -> Dataset[Any]:
    """Return torchvision's MNIST. If its download fails, return the digits from another host.

    If the environment variable ``PL_USE_MOCKED_MNIST`` is set, always use the other host, without torchvision.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    if os.environ.get("PL_USE_MOCKED_MNIST"):
        return _HostedMNIST(*args, **kwargs)
    check_installed("MNIST", "torchvision", "the variable PL_USE_MOCKED_MNIST=1")

    try:
        torchvision.datasets.MNIST(_FOLDER, download=True)
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError if all its hosts have refused
        rank_zero_warn(f"torchvision could not download MNIST: {error}. It is downloaded from {_HOST}.")
        return _HostedMNIST(*args, **kwargs)
    return torchvision.datasets.MNIST(*args, **kwargs)


class MNISTDataModule(LightningDataModule):
    """The digits, split for training, validation and test.

    Args:
        data_dir: the folder of the files.
        val_split: the number of training images used for validation.
        num_workers: the workers of each loader.
        normalize: scale pixels to -1 ... 1 instead of 0 ... 1; needs torchvision.
        seed: the value of the attribute ``seed``; it does not change the split.
        batch_size: the batch size of each loader; an incomplete last batch is dropped.
    """

    name = "mnist"

    def __init__(
        self,
        data_dir: str = _FOLDER,
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir, self.val_split, self.seed = data_dir, val_split, seed
        self.num_workers, self.normalize, self.batch_size = num_workers, normalize, batch_size

    @property
    def num_classes(self) -> int:
        """Ten digits."""
        return 10

    @property
    def default_transforms(self) -> Callable[[Any], Tensor] | None:
        """Return the transform from an image to a tensor; ``None`` without torchvision, because then each sample is a
        tensor.
        """
        if find_spec("torchvision") is None:
            return None

        transforms = torchvision.transforms
        as_tensor: Callable[[Any], Tensor] = transforms.ToTensor()
        if not self.normalize:
            return as_tensor
        return transforms.Compose([as_tensor, transforms.Normalize((0.5,), (0.5,))])

    def prepare_data(self) -> None:
        for train in (True, False):
            MNIST(self.data_dir, train=train, download=True)

    def setup(self, stage: str) -> None:
        digits = self._digits(train=True)
        sizes = [len(digits) - self.val_split, self.val_split]  # type: ignore[arg-type]
        self.dataset_train, self.dataset_val = random_split(digits, sizes, torch.Generator().manual_seed(42))

    def train_dataloader(self) -> Any:
        return self._loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader(self.dataset_val)

    def test_dataloader(self) -> Any:
        return self._loader(self._digits(train=False))

    def _digits(self, train: bool) -> Dataset[Any]:
        transform = self.default_transforms
        return MNIST(self.data_dir, train=train, download=False, **({"transform": transform} if transform else {}))

    def _loader(self, dataset: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            drop_last=True,
            pin_memory=torch.accelerator.is_available(),  # torch warns about True without an accelerator
        )
