"""Mistakes with loaders, data modules and samplers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset, RandomIterableDataset
from lightning.pytorch.utilities import CombinedLoader
from tests.compat.mistakes.common import LONG, Mistakes, fit, loader, make, one
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

Hooks = pl.LightningModule


class Named(DataLoader):
    """A loader whose constructor hides the arguments of its base."""

    def __init__(self, name: str, samples: int) -> None:
        super().__init__(RandomDataset(32, samples))


class Own(DataLoader):
    """A loader that sets its sampler itself."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, sampler=SequentialSampler(dataset), **options)


class Pairs:
    """Batches of two, by a class that is no BatchSampler."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


class Needy(BatchSampler):
    """A BatchSampler whose constructor has other arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(SequentialSampler(range(4)), 2, False)


class Fails:
    """A loader that cannot be started."""

    def __iter__(self) -> Any:
        raise KeyError("no samples")

    def __len__(self) -> int:
        return 2


def stream() -> Any:
    return DataLoader(RandomIterableDataset(32, 8))


def train(train_loader: Any, **arguments: Any) -> None:
    make(**{**LONG, **arguments}).fit(BoringModel(), train_loader)


def predict(*loaders: Any, **arguments: Any) -> None:
    make(**{**LONG, **arguments}).predict(BoringModel(), *loaders)


MISTAKES: Mistakes = {
    "no_train_dataloader": lambda: fit(one(train_dataloader=Hooks.train_dataloader)),
    "no_val_dataloader": lambda: make(**LONG).validate(one(val_dataloader=Hooks.val_dataloader)),
    "no_test_dataloader": lambda: make(**LONG).test(one(test_dataloader=Hooks.test_dataloader)),
    "no_predict_dataloader": lambda: make(**LONG).predict(one(predict_dataloader=Hooks.predict_dataloader)),
    "train_loader_number": lambda: train(3),
    "train_loader_class": lambda: train(DataLoader),
    "train_loader_list_of_numbers": lambda: train([3]),
    "train_loader_dict_of_numbers": lambda: train({"a": 3}),
    "train_loader_fails": lambda: train(Fails()),
    "train_loader_module": lambda: make(**LONG).fit(BoringModel(), pl.LightningDataModule()),
    "val_loader_number": lambda: make(**LONG).fit(BoringModel(), loader(), 3),
    "validate_number": lambda: make(**LONG).validate(BoringModel(), 3),
    "test_number": lambda: make(**LONG).test(BoringModel(), [3]),
    "predict_number": lambda: predict(3),
    "train_hook_returns_number": lambda: fit(one(train_dataloader=lambda self: 3)),
    "train_hook_returns_none": lambda: fit(one(train_dataloader=lambda self: None)),
    "val_hook_returns_number": lambda: fit(one(val_dataloader=lambda self: 3), **LONG),
    "val_hook_returns_none": lambda: fit(one(val_dataloader=lambda self: None), **LONG),
    "test_hook_returns_none": lambda: make(**LONG).test(one(test_dataloader=lambda self: None)),
    "predict_hook_returns_none": lambda: make(**LONG).predict(one(predict_dataloader=lambda self: None)),
    "empty_train_loader": lambda: train([]),
    "empty_train_dataset": lambda: train(DataLoader([])),
    "empty_val_list": lambda: make(**LONG).validate(BoringModel(), []),
    "fraction_below_one_batch": lambda: train(loader(), limit_train_batches=0.01),
    "val_fraction_below_one_batch": lambda: make(**{**LONG, "limit_val_batches": 0.01}).validate(
        BoringModel(), loader()
    ),
    "overfit_fraction_below_one_batch": lambda: train(loader(), overfit_batches=0.01),
    "fraction_of_a_stream": lambda: train(stream(), limit_train_batches=0.5),
    "val_fraction_of_a_stream": lambda: make(**{**LONG, "limit_val_batches": 0.5}).validate(BoringModel(), stream()),
    "val_check_interval_of_a_stream": lambda: train(stream(), limit_train_batches=1.0, val_check_interval=0.5),
    "val_check_interval_too_long": lambda: train(loader(), val_check_interval=100),
    "sequential_training": lambda: train(CombinedLoader([loader(), loader()], "sequential")),
    "max_size_prediction": lambda: predict(CombinedLoader([loader(), loader()], "max_size")),
    "min_size_prediction": lambda: predict(CombinedLoader([loader(), loader()], "min_size")),
    "combined_mode": lambda: CombinedLoader([loader()], "nonsense"),
    "combined_length": lambda: len(CombinedLoader([loader()])),
    "combined_limits": lambda: setattr(CombinedLoader([loader()], "sequential"), "limits", [1, 2]),
    "combined_flattened": lambda: setattr(CombinedLoader([loader()]), "flattened", [1, 2]),
    "combined_next": lambda: next(CombinedLoader([loader()])),
    "combined_number": lambda: iter(CombinedLoader(3)),
    "overfit_named_loader": lambda: train(Named("a", 8), overfit_batches=1),
    "overfit_own_sampler": lambda: train(Own(RandomDataset(32, 8)), overfit_batches=1),
    "predict_named_loader": lambda: predict(Named("a", 8)),
    "predict_strange_batch_sampler": lambda: predict(DataLoader(RandomDataset(32, 4), batch_sampler=Pairs())),
    "predict_needy_batch_sampler": lambda: predict(DataLoader(RandomDataset(32, 4), batch_sampler=Needy("a"))),
    "datamodule_number": lambda: make(**LONG).fit(BoringModel(), datamodule=3),
    "datamodule_class": lambda: make(**LONG).fit(BoringModel(), datamodule=pl.LightningDataModule),
    "datamodule_without_train_loader": lambda: make(**LONG).fit(
        one(train_dataloader=Hooks.train_dataloader), datamodule=pl.LightningDataModule()
    ),
    "from_datasets_unknown": lambda: pl.LightningDataModule.from_datasets(nonsense=1),
}
