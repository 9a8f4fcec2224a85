"""A data module of the 1.3 generation: what was done by hand is not done again, and what its class says stays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain.legacy import v1_1
from drivetrain.legacy import v1_3 as pl

from .test_trainer import Net, loader, quiet


class Calls:
    """Counts the calls of its hooks, and calls those of the next class."""

    calls: list[str]

    def prepare_data(self) -> None:
        vars(self).setdefault("calls", []).append("prepare_data")

    def setup(self, stage: str | None = None) -> None:
        vars(self).setdefault("calls", []).append(f"setup {stage}")

    def teardown(self, stage: str | None = None) -> None:
        vars(self).setdefault("calls", []).append(f"teardown {stage}")


class Mixed(Calls, pl.LightningDataModule):
    """Its hooks come from a class that is no data module."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


class Longer(Mixed):
    """Its setup calls that of its base."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.calls.append("longer")


def test_what_was_set_up_by_hand_is_not_set_up_again() -> None:
    data = Longer()
    assert not data.has_prepared_data
    data.prepare_data()
    data.setup()
    data.setup("fit")
    assert data.calls == ["prepare_data", "setup None", "longer"]
    assert data.has_prepared_data
    assert data.has_setup_fit
    assert data.has_setup_test
    assert not data.has_setup_predict
    assert not data.has_teardown_fit
    for _ in range(2):
        quiet().fit(Net(), datamodule=data)
    assert data.calls[3:] == ["teardown fit"]
    assert data.has_teardown_fit


def test_each_stage_is_set_up_once_by_the_trainer() -> None:
    data = Mixed()
    for _ in range(2):
        quiet().fit(Net(), datamodule=data)
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]
    for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        other.setup("fit")
        assert other.calls == data.calls


def test_a_setup_that_failed_may_be_called_again() -> None:
    class Fails(pl.LightningDataModule):
        fails = True

        def setup(self, stage: str | None = None) -> None:
            if self.fails:
                raise OSError("no such folder")

    data = Fails()
    with pytest.raises(OSError, match="no such folder"):
        data.setup("fit")
    assert not data.has_setup_fit
    data.fails = False
    data.setup("fit")
    assert data.has_setup_fit


@pytest.mark.parametrize("generation", [pl, v1_1])
def test_what_the_class_says_of_its_samples_is_not_hidden(generation: Any) -> None:
    class Data(generation.LightningDataModule):  # type: ignore[misc, name-defined]
        dims = (1, 28, 28)
        train_transforms = "those of the class"

    assert Data().size(1) == 28
    assert Data(dims=(3, 2)).size() == (3, 2)
    assert Data().train_transforms == "those of the class"
    assert generation.LightningDataModule().dims == ()


def test_a_data_module_without_a_setup_is_set_up_by_hand() -> None:
    class Plain(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    data = Plain()
    data.setup()
    trainer = quiet()
    trainer.fit(Net(), datamodule=data)
    data.teardown()
    assert trainer.global_step > 0
