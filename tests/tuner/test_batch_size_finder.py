from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.conftest import regression_data
from tests.tuner.test_lr_finder import Tuned, equal, everything
from torch.utils.data import DataLoader

from drivetrain import LightningDataModule
from drivetrain.callbacks import BatchSizeFinder
from drivetrain.errors import ConfigurationError
from drivetrain.tuner import Tuner


class Limited(Tuned):
    """Memory for ``memory`` samples in a batch."""

    def __init__(self, memory: int = 50, samples: int = 1000, batch_size: int = 4) -> None:
        super().__init__()
        self.memory, self.samples, self.batch_size = memory, samples, batch_size
        self.sizes: set[int] = set()

    def _check(self, batch: Any) -> None:
        SIZES.append(len(batch[0]))
        if len(batch[0]) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._check(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._check(batch)
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._check(batch)
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self._check(batch)
        return batch[0].sum()

    def train_dataloader(self) -> Any:
        return DataLoader(regression_data(self.samples), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(self.samples), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


SIZES: list[int] = []  # of all batches; the trials would put an attribute back


@pytest.mark.parametrize(
    ("arguments", "memory", "samples", "found", "tried"),
    [
        ({}, 50, 1000, 32, [2, 4, 8, 16, 32, 64]),
        ({"mode": "binsearch", "margin": 0}, 50, 1000, 50, [2, 4, 8, 16, 32, 64, 48, 56, 52, 50, 51]),
        ({"mode": "binsearch", "margin": 0.1}, 50, 1000, 45, [2, 4, 8, 16, 32, 64, 48, 56, 52, 50, 51]),
        ({"mode": "binsearch"}, 5000, 20, 19, [2, 4, 8, 16, 20]),  # the reserve also where memory did not run out
        ({}, 5000, 20, 20, [2, 4, 8, 16, 20]),
        ({"max_val": 10}, 5000, 1000, 10, [2, 4, 8, 10]),
        ({"max_trials": 3}, 5000, 1000, 8, [2, 4, 8]),
        ({"init_val": 64}, 20, 1000, 16, [64, 32, 16]),
    ],
)
def test_the_size_that_fits(
    make_trainer: Any, arguments: Any, memory: int, samples: int, found: int, tried: list[int]
) -> None:
    SIZES.clear()
    module = Limited(memory, samples)
    assert Tuner(make_trainer()).scale_batch_size(module, steps_per_trial=1, **arguments) == found
    assert module.batch_size == found
    assert tried == SIZES


def test_a_size_reduced_by_the_margin_is_said_to_be(make_trainer: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "drivetrain"):
        Tuner(make_trainer()).scale_batch_size(Limited(50), mode="binsearch", steps_per_trial=1, margin=0.1)
    assert "batch_size is 45 now, 10% less than the 50 that fit, after 11 trials" in caplog.text
    assert "Nothing to train" not in caplog.text  # the Tuner wants no training


def test_a_fit_after_the_finder_is_a_fit_with_that_size_from_the_start(make_trainer: Any) -> None:
    module, trainer = Limited(samples=200), make_trainer(callbacks=BatchSizeFinder(), limit_val_batches=0)
    trainer.fit(module)
    plain, other = Limited(samples=200, batch_size=32), make_trainer(limit_val_batches=0)
    other.fit(plain)
    ours, theirs = everything(module, trainer), everything(plain, other)
    assert equal(ours["weights"], theirs["weights"])
    for name in ("optimizer", "schedulers", "progress", "metrics", "steps", "seen", "random", "modes"):
        assert str(ours[name]) == str(theirs[name]), name


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluations_use_the_size_that_was_found(make_trainer: Any, method: str) -> None:
    SIZES.clear()
    module = Limited(samples=200)
    trainer = make_trainer(callbacks=BatchSizeFinder(steps_per_trial=1))
    options = {} if method == "predict" else {"verbose": False}
    found = getattr(trainer, method)(module, **options)
    assert module.batch_size == 32
    assert [2, 4, 8, 16, 32, 64, *6 * [32], 8] == SIZES
    assert len(found) == (7 if method == "predict" else 1)

    SIZES.clear()
    other = Limited(samples=200)
    assert Tuner(make_trainer()).scale_batch_size(other, method=method, steps_per_trial=1) == 32
    assert SIZES == [2, 4, 8, 16, 32, 64]


def test_the_size_of_a_datamodule(make_trainer: Any) -> None:
    class Data(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.rows = 4
            self.save_hyperparameters({"rows": 4})

        def train_dataloader(self) -> Any:
            return DataLoader(regression_data(100), batch_size=self.rows)

    data = Data()
    tuner = Tuner(make_trainer(limit_val_batches=0))
    assert tuner.scale_batch_size(Limited(), datamodule=data, batch_arg_name="rows") == 32
    assert data.rows == data.hparams.rows == 32


def test_what_it_refuses(make_trainer: Any, loader: Any) -> None:
    for arguments in [{"mode": "x"}, {"init_val": 0}, {"steps_per_trial": 0}, {"margin": 1.0}]:
        with pytest.raises(ConfigurationError, match=next(iter(arguments))):
            BatchSizeFinder(**arguments)
    with pytest.raises(ConfigurationError, match=r"trainer\.fit does not read it"):
        make_trainer(callbacks=BatchSizeFinder(), limit_val_batches=0).fit(Limited(), loader)
    with pytest.raises(torch.OutOfMemoryError):
        Tuner(make_trainer()).scale_batch_size(Limited(memory=0))
    module: Any = Limited()
    module.training_step = _fails
    with pytest.raises(ValueError, match="on purpose"):
        Tuner(make_trainer()).scale_batch_size(module)


def _fails(batch: Any, batch_idx: int) -> None:
    raise ValueError("on purpose")


def test_after_the_tuner_the_trainer_knows_its_loaders(make_trainer: Any) -> None:
    module, trainer = Limited(50, 1000), make_trainer()
    draws = torch.get_rng_state()
    assert Tuner(trainer).scale_batch_size(module, steps_per_trial=1) == 32
    assert torch.equal(torch.get_rng_state(), draws)
    assert trainer.train_dataloader.batch_size == 32
    assert trainer.num_training_batches == 32  # 1000 samples
    assert trainer.global_step == 0
    trainer.fit(module)
    assert trainer.global_step == 32


def test_after_the_tuner_the_trainer_knows_its_datamodule(make_trainer: Any) -> None:
    class Data(LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(regression_data(), batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(regression_data(), batch_size=self.batch_size)

    class Judged(Tuned):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    data, module, trainer = Data(), Judged(), make_trainer()
    Tuner(trainer).scale_batch_size(module, datamodule=data, steps_per_trial=1, max_trials=2)
    assert trainer.datamodule is data
    assert trainer.train_dataloader.batch_size == data.batch_size == 4

    trainer = make_trainer()
    Tuner(trainer).scale_batch_size(module, datamodule=data, method="validate", steps_per_trial=1, max_trials=2)
    assert trainer.val_dataloaders.batch_size == 4
    assert trainer.num_val_batches == [8]
    assert trainer.train_dataloader is None
