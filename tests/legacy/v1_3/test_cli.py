"""LightningCLI of the 1.3 generation: no subcommands, the flags of its Trainer, and a fit that runs at once."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.legacy import v1_3 as pl
from drivetrain.legacy.v1_3.availability import _module_available
from drivetrain.legacy.v1_3.cli import LightningCLI


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(pl.LightningDataModule):
    def __init__(self, samples: int = 8) -> None:
        super().__init__()
        self.samples = samples

    def train_dataloader(self) -> Any:
        return DataLoader(list(torch.zeros(self.samples, 4)), batch_size=4)


class Quiet(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.set_defaults({"trainer.max_epochs": 2, "trainer.progress_bar_refresh_rate": 0})

    def after_fit(self) -> None:
        self.ended = True


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_command_line_is_that_of_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--model.lr=0.2", "--data.samples=12", "--trainer.checkpoint_callback=False", "--trainer.logger=False"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options, "--trainer.weights_summary=null"])
    cli = Quiet(Net, Data, seed_everything_default=1, save_config_callback=None)
    assert type(cli.trainer) is pl.Trainer
    assert (cli.model.hparams.lr, cli.trainer.current_epoch, cli.trainer.global_step) == (0.2, 1, 6)
    assert cli.fit_result == 1
    assert cli.ended


def test_whether_a_package_is_there() -> None:
    assert _module_available("torch.nn")
    assert not _module_available("there_is_no.such_package")
