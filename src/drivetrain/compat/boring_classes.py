"""``demos.boring_classes``: minimal models and data for test suites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.module import LightningModule

_FEATURES = 32
_SAMPLES = 64  # per stage


class RandomDataset(Dataset[Tensor]):
    """``length`` normal vectors of ``size`` numbers, drawn once."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """The same vectors as "a" in a dictionary, with "b", which is "a" plus 2."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.data[index], "b": self.data[index] + 2}

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """``count`` normal vectors of ``size`` numbers, drawn during iteration."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """The same with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """One linear layer from 32 numbers to 2, trained by SGD towards 1; it defines its own loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared distance from ``labels``, or from 1."""
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(_FEATURES, _SAMPLES))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class ManualOptimBoringModel(BoringModel):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(LightningModule):
    """One linear layer with a squashed output, trained by Adam; with arguments for command lines."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(_FEATURES, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return {"loss": self(batch).sum()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class _OneSetPerStage(LightningDataModule):
    """A loader for each stage over the data set that ``setup`` has made for it."""

    random_train: Dataset[Tensor]
    random_val: Dataset[Tensor]
    random_test: Dataset[Tensor]
    random_predict: Dataset[Tensor]

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class BoringDataModule(_OneSetPerStage):
    """Random vectors for :class:`BoringModel`, a part of one data set for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(_FEATURES, 4 * _SAMPLES)

    def setup(self, stage: str) -> None:
        """Create the parts for ``stage``."""
        parts = {"train": ("fit",), "val": ("fit", "validate"), "test": ("test",), "predict": ("predict",)}
        for position, (name, stages) in enumerate(parts.items()):
            if stage in stages:
                part = Subset(self.random_full, range(position * _SAMPLES, (position + 1) * _SAMPLES))
                setattr(self, f"random_{name}", part)


_STREAMED = {"train": 512, "val": 128, "test": 256, "predict": 64}  # samples by stage
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class BoringDataModuleNoLen(_OneSetPerStage):
    """Random vectors for :class:`BoringModel`, from data sets without a length."""

    def setup(self, stage: str) -> None:
        """Create the data sets for ``stage``."""
        for name in _STAGES[stage]:
            setattr(self, f"random_{name}", RandomIterableDataset(_FEATURES, _STREAMED[name]))


class IterableBoringDataModule(LightningDataModule):
    """Random vectors for :class:`BoringModel`: for each stage two loaders, the second without a length."""

    train_datasets: list[Dataset[Tensor]]
    val_datasets: list[Dataset[Tensor]]
    test_datasets: list[Dataset[Tensor]]
    predict_datasets: list[Dataset[Tensor]]

    def setup(self, stage: str) -> None:
        """Create the data sets for ``stage``."""
        for name in _STAGES[stage]:
            samples = _STREAMED[name]
            pair = [RandomDataset(_FEATURES, samples), RandomIterableDataset(_FEATURES, samples)]
            setattr(self, f"{name}_datasets", pair)

    def train_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.train_datasets]

    def val_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.val_datasets]

    def test_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.test_datasets]

    def predict_dataloader(self) -> Any:
        return [DataLoader(each) for each in self.predict_datasets]


class Net(nn.Module):
    """A small convolutional network for images of 28 x 28 pixels; it returns ten log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        hidden = F.relu(self.fc1(self.dropout1(features).flatten(1)))
        return F.log_softmax(self.fc2(self.dropout2(hidden)), dim=1)
