"""Lightning's ``demos.boring_classes``: minimal models and data for test suites."""

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
_SAMPLES = 64  # the number of samples per stage


class RandomDataset(Dataset[Tensor]):
    """``length`` vectors of ``size`` normal random numbers, which the constructor draws."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """Each sample is a dictionary: "a" is a random vector, and "b" is "a" plus 2."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]  # as Lightning's
        return {"a": self.data[index], "b": self.data[index] + 2}


class RandomIterableDataset(IterableDataset[Tensor]):
    """``count`` vectors of ``size`` normal random numbers, which the iterator draws one by one."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """:class:`RandomIterableDataset` with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """A linear layer with 32 inputs and 2 outputs, trained by SGD to return ones. The model defines its own loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared error between ``preds`` and ``labels``. By default, all labels are 1."""
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
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
    """:class:`BoringModel` with manual optimization."""

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
    """One linear layer and a ReLU, trained by Adam."""

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


_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
_STREAMED = {"train": 512, "val": 128, "test": 256, "predict": 64}  # the number of samples by stage


def _loaders(name: str) -> Any:
    def loaders(self: _DataPerStage) -> Any:
        data = getattr(self, self._attribute.format(name))
        return [DataLoader(each) for each in data] if isinstance(data, list) else DataLoader(data)

    return loaders


class _DataPerStage(LightningDataModule):
    """Base class with a loader for each data set that ``setup`` creates."""

    _attribute: str

    def setup(self, stage: str) -> None:
        for name in _STAGES.get(stage, ()):
            setattr(self, self._attribute.format(name), self._data(name))

    def _data(self, name: str) -> Any:
        raise NotImplementedError

    train_dataloader = _loaders("train")
    val_dataloader = _loaders("val")
    test_dataloader = _loaders("test")
    predict_dataloader = _loaders("predict")


class _OneSetPerStage(_DataPerStage):
    _attribute = "random_{}"
    random_train: Dataset[Tensor]
    random_val: Dataset[Tensor]
    random_test: Dataset[Tensor]
    random_predict: Dataset[Tensor]


class BoringDataModule(_OneSetPerStage):
    """Random vectors for :class:`BoringModel`: training, validation, test and prediction each get a part of one data
    set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(_FEATURES, 4 * _SAMPLES)

    def _data(self, name: str) -> Subset[Tensor]:
        start = list(_STREAMED).index(name) * _SAMPLES
        return Subset(self.random_full, range(start, start + _SAMPLES))


class BoringDataModuleNoLen(_OneSetPerStage):
    """Random vectors for :class:`BoringModel`, from data sets without a length."""

    def _data(self, name: str) -> RandomIterableDataset:
        return RandomIterableDataset(_FEATURES, _STREAMED[name])


class IterableBoringDataModule(_DataPerStage):
    """Random vectors for :class:`BoringModel`. Each stage has two loaders; the second one has no ``len()``."""

    _attribute = "{}_datasets"
    train_datasets: list[Dataset[Tensor]]
    val_datasets: list[Dataset[Tensor]]
    test_datasets: list[Dataset[Tensor]]
    predict_datasets: list[Dataset[Tensor]]

    def _data(self, name: str) -> list[Dataset[Tensor]]:
        samples = _STREAMED[name]
        return [RandomDataset(_FEATURES, samples), RandomIterableDataset(_FEATURES, samples)]


class Net(nn.Module):
    """A small convolutional network for images of 28 x 28 pixels; the output is ten log-probabilities."""

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
