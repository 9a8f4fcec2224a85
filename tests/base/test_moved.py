"""Pickles and checkpoints that earlier versions wrote name modules that have moved since; they still load."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain import Engine, LightningModule, Trainer, WeightedLoss
from drivetrain.base.moved import MOVED, MovedModules
from drivetrain.callbacks import EarlyStopping
from drivetrain.checkpoints.references import find

STORED = Path(__file__).parent / "stored"


def test_a_pickle_of_version_0_1_0_loads() -> None:
    with open(STORED / "0.1.0.pickle", "rb") as stream:
        values = pickle.load(stream)
    assert values["hparams"].width == 4
    assert values["hparams"]["base"] is values["module class"] is LightningModule
    assert type(values["weighted"]) is WeightedLoss
    assert (values["trainer class"], values["engine class"]) == (Trainer, Engine)
    assert type(values["callback"]) is EarlyStopping


def test_a_new_process_loads_it_too(programs: Any, tmp_path: Path) -> None:
    """There, nothing has been imported before the pickle asks for it."""
    program = f"import pickle; print(sorted(pickle.load(open({str(STORED / '0.1.0.pickle')!r}, 'rb'))))"
    done = programs.run("-c", program, cwd=tmp_path)
    assert done.stdout.startswith("['callback', 'engine class'")


def test_a_checkpoint_of_version_0_1_0_loads(tmp_path: Path) -> None:
    class Net(LightningModule):
        def __init__(self, base: type = LightningModule, loss: type = WeightedLoss) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 1), 2), ckpt_path=STORED / "0.1.0.ckpt")
    assert trainer.global_step == 4


def test_names_in_checkpoints_are_found() -> None:
    assert find("drivetrain.losses:WeightedLoss") is WeightedLoss
    assert find("drivetrain.module:LightningModule") is LightningModule
    assert find("drivetrain.losses:Missing") is None


@pytest.mark.parametrize("name", sorted(MOVED))
def test_every_earlier_name_is_the_module_of_today(name: str) -> None:
    today = importlib.import_module(MOVED[name])
    earlier = importlib.import_module(name)
    assert earlier is today or earlier.__path__  # a folder has taken the name, and offers the public class
    assert today.__spec__ is not None
    assert today.__spec__.name == today.__name__ == MOVED[name]


def test_nothing_else_is_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("drivetrain.nothing")
    assert sum(isinstance(finder, MovedModules) for finder in sys.meta_path) == 1
    assert drivetrain.Trainer is Trainer
