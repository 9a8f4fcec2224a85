"""``drivetrain exec --generation 1.1``: programs of 1.0 and 1.1 run unchanged."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain import compat
from drivetrain.clusters import ClusterEnvironment
from drivetrain.compat import command, finder, table

PROGRAM = """
import os
from argparse import ArgumentParser

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pytorch_lightning as pl
from pytorch_lightning import _logger as log
from pytorch_lightning.accelerators.accelerator import Accelerator
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.cluster_environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.core.lightning import LightningModule
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.metrics.functional import accuracy
from pytorch_lightning.utilities import rank_zero_warn


class TorchElasticEnvironment(ClusterEnvironment):
    def __init__(self):
        super().__init__()

    def master_address(self):
        if "MASTER_ADDR" not in os.environ:
            rank_zero_warn("MASTER_ADDR environment variable is not defined. Set as localhost")
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        log.debug(f"MASTER_ADDR: {os.environ['MASTER_ADDR']}")
        return os.environ.get("MASTER_ADDR")

    def master_port(self):
        if "MASTER_PORT" not in os.environ:
            rank_zero_warn("MASTER_PORT environment variable is not defined. Set as 12910")
            os.environ["MASTER_PORT"] = "12910"
        return os.environ.get("MASTER_PORT")

    def world_size(self):
        return os.environ.get("WORLD_SIZE")

    def local_rank(self):
        return int(os.environ["LOCAL_RANK"])


class MyAccelerator(Accelerator):
    def __init__(self, trainer, cluster_environment=None):
        super().__init__(trainer, cluster_environment)
        self.nickname = "my_accelerator"

    def train(self):
        print("trains", self.trainer.distributed_backend)
        return super().train()


class Net(LightningModule):
    def __init__(self, hparams):
        super().__init__()
        self.hparams = hparams
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        result = pl.TrainResult(minimize=nn.functional.cross_entropy(self(x), y))
        result.log("train_loss", result.minimize, on_step=False, on_epoch=True)
        return result

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"val_loss": nn.functional.cross_entropy(self(x), y), "acc": accuracy(self(x), y)}

    def validation_epoch_end(self, outputs):
        loss = torch.stack([each["val_loss"] for each in outputs]).mean()
        return {"val_loss": loss, "log": {"val_loss": loss, "val_acc": outputs[0]["acc"]}}

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
    cluster = TorchElasticEnvironment()
    trainer = pl.Trainer.from_argparse_args(
        args, checkpoint_callback=ModelCheckpoint("ckpt/{epoch}", monitor="val_acc", save_top_k=2),
        callbacks=[EarlyStopping("val_loss")], logger=CSVLogger("."), plugins=[cluster], accelerator=MyAccelerator(),
    )
    trainer.fit(Net(args))
    assert trainer.accelerator_backend.cluster_environment is cluster
    best = trainer.checkpoint_callback.best_model_path
    assert Net.load_from_checkpoint(best).hparams.lr == args.lr
    print("trained with", pl.__version__, "for", trainer.current_epoch + 1, "epochs")
"""


@pytest.fixture
def served() -> Iterator[None]:
    """The modules of that time may be imported in this process."""
    compat.install(generation="1.1")
    yield
    compat.uninstall()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_e3_2_a_program_of_that_time_runs_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    options = ["--max_epochs", "2", "--lr=0.1", "--progress_bar_refresh_rate", "0"]
    try:
        assert not command.main(["--generation", "1.1", "train.py", *options])
    finally:
        compat.uninstall()
    printed = capfd.readouterr().out
    assert "trains my_accelerator" in printed
    assert "trained with 1.1.0 for 2 epochs" in printed


@pytest.mark.parametrize("path", table.GENERATIONS["1.1"].served, ids=lambda path: path or "pytorch_lightning")
def test_every_name_of_the_table_exists(served: None, path: str) -> None:
    for _, home, name in finder.offers(path):
        assert getattr(importlib.import_module(home), name) is not None


def test_e3_3_each_accelerator_is_at_its_own_path(served: None) -> None:
    paths = {
        "cpu_accelerator": "CPUAccelerator", "ddp_accelerator": "DDPAccelerator",
        "ddp2_accelerator": "DDP2Accelerator", "ddp_cpu_hpc_accelerator": "DDPCPUHPCAccelerator",
        "ddp_cpu_spawn_accelerator": "DDPCPUSpawnAccelerator", "ddp_hpc_accelerator": "DDPHPCAccelerator",
        "ddp_spawn_accelerator": "DDPSpawnAccelerator", "dp_accelerator": "DataParallelAccelerator",
        "gpu_accelerator": "GPUAccelerator", "horovod_accelerator": "HorovodAccelerator",
        "tpu_accelerator": "TPUAccelerator",
    }  # fmt: skip
    package = importlib.import_module("pytorch_lightning.accelerators")
    for file, name in paths.items():
        module = importlib.import_module(f"pytorch_lightning.accelerators.{file}")
        assert getattr(module, name) is getattr(package, name)


def test_the_version_is_that_of_the_generation(served: None) -> None:
    assert importlib.import_module("pytorch_lightning").__version__ == "1.1.0"
    assert importlib.metadata.version("pytorch-lightning") == "1.1.0"
    assert importlib.import_module("pytorch_lightning").metrics.Accuracy().compute is not None
    clusters = importlib.import_module("pytorch_lightning.cluster_environments.cluster_environment")
    assert clusters.ClusterEnvironment is ClusterEnvironment
    with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.strategies"):
        importlib.import_module("pytorch_lightning.strategies")
