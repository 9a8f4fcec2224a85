"""``drivetrain exec --generation 1.3``: programs of that time run unchanged."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain import compat
from drivetrain.compat import children, command, finder, table
from drivetrain.errors import ConfigurationError, NotSupportedError

PROGRAM = """
from argparse import ArgumentParser

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.core.lightning import LightningModule
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.metrics import Accuracy
from pytorch_lightning.plugins import DDPPlugin
from pytorch_lightning.utilities.distributed import rank_zero_info


class Net(LightningModule):
    def __init__(self, hparams):
        super().__init__()
        self.hparams = hparams
        self.net = nn.Linear(4, 2)
        self.accuracy = Accuracy()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        return {"loss": loss, "log": {"train_loss": loss}}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"val_loss": nn.functional.cross_entropy(self(x), y), "acc": self.accuracy(self(x), y)}

    def validation_epoch_end(self, outputs):
        self.log("val_loss", torch.stack([each["val_loss"] for each in outputs]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self):
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)

    val_dataloader = train_dataloader


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser = pl.Trainer.add_argparse_args(parser)
    args = parser.parse_args()
    pl.seed_everything(1)
    trainer = pl.Trainer.from_argparse_args(
        args, checkpoint_callback=ModelCheckpoint(dirpath="ckpt", monitor="val_loss", save_top_k=2, period=1),
        callbacks=[EarlyStopping("val_loss")], logger=CSVLogger("."), plugins=[DDPPlugin(find_unused_parameters=False)],
    )
    trainer.fit(Net(args))
    best = trainer.checkpoint_callback.best_model_path
    assert Net.load_from_checkpoint(best).hparams.lr == args.lr
    print("trained with", pl.__version__, "for", trainer.current_epoch + 1, "epochs")
"""


@pytest.fixture
def served() -> Iterator[None]:
    """The modules of that time may be imported in this process."""
    compat.install(generation="1.3")
    yield
    compat.uninstall()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:train_loss. logged in training steps")
def test_a_program_of_that_time_runs_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    options = ["--max_epochs", "2", "--lr=0.1", "--progress_bar_refresh_rate", "0"]
    try:
        assert not command.main(["--generation", "1.3", "train.py", *options])
    finally:
        compat.uninstall()
    assert "trained with 1.3.8 for 2 epochs" in capfd.readouterr().out


@pytest.mark.parametrize("path", table.GENERATIONS["1.3"].served, ids=lambda path: path or "pytorch_lightning")
def test_every_name_of_the_table_exists(served: None, path: str) -> None:
    for _, home, name in finder.offers(path):
        assert getattr(importlib.import_module(home), name) is not None


def test_the_version_is_that_of_the_generation(served: None) -> None:
    assert importlib.import_module("pytorch_lightning").__version__ == "1.3.8"
    assert importlib.metadata.version("pytorch-lightning") == "1.3.8"
    assert os.environ[children.GENERATION] == "1.3"
    compat.install()
    assert importlib.metadata.version("lightning") == table.LATEST.version
    assert children.GENERATION not in os.environ


def test_a_module_that_was_not_there_is_refused(served: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.strategies"):
        importlib.import_module("pytorch_lightning.strategies")


def test_a_name_that_is_only_imported_does_no_harm(served: None) -> None:
    loggers = importlib.import_module("pytorch_lightning.loggers")
    assert not isinstance(object(), loggers.TestTubeLogger)
    with pytest.raises(NotSupportedError, match=r"TestTubeLogger is not supported yet. Use TensorBoardLogger"):
        loggers.TestTubeLogger("logs")
    plugin = importlib.import_module("pytorch_lightning.plugins").RPCSequentialPlugin
    with pytest.raises(NotSupportedError, match=r"RPCSequentialPlugin is not supported yet. Use PipelineStrategy"):
        plugin()


def test_an_unknown_generation_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"generation '1\.4'.*1\.3"):
        compat.install(generation="1.4")
    with pytest.raises(SystemExit):
        command.main(["--generation", "0.9", "train.py"])
    assert "there is no generation '0.9'" in capsys.readouterr().err


def test_started_processes_inherit_the_generation(served: None, tmp_path: Path) -> None:
    code = "import importlib.metadata as m; print(m.version('pytorch-lightning'))"
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
    done = run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "1.3.8", done.stderr


def test_the_combined_loader_is_where_it_was() -> None:
    assert table.GENERATIONS["1.3"].served["trainer.supporters"] == ("drivetrain.data.combined: CombinedLoader",)
