"""Runs whose files are at an address, for every store: tests/trainer/test_addresses.py and tests/extras/test_s3.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.base import remote
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.strategies import FSDPStrategy

BATCHES = 4


class Net(LightningModule):
    """Draws random numbers in each step, so that only an exact resume ends with the same weights."""

    def __init__(self, width: int = 4, fails_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.fails_at = fails_at
        self.layer = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("the machine is on fire")
        loss = self.layer(batch[0] + torch.randn(3)).square().mean()
        self.log("loss", loss)
        self.log("falling", -float(self.global_step))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def net(**kwargs: Any) -> Net:
    torch.manual_seed(1)
    return Net(**kwargs)


def loader() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24)
    return DataLoader(data, batch_size=8 // BATCHES, shuffle=True)


def trainer(folder: str, epochs: int = 2, **kwargs: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    defaults = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "max_epochs": epochs, "logger": False}
    return Trainer(**{**defaults, **quiet, **kwargs})


def names(folder: str) -> list[str]:
    return sorted(remote.names(folder))


def weights(module: LightningModule) -> list[Tensor]:
    return [each.detach().clone() for each in module.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextlib.contextmanager
def no_local_files(folder: Path) -> Iterator[None]:
    """Context after which nothing lies in the working directory."""
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        yield
    assert list(folder.iterdir()) == []


def check_fit_saves_and_resumes_exactly(folder: str) -> None:
    """Saves at the end of each epoch and inside of one; ``ckpt_path="last"`` continues as if nothing had happened."""
    torch.manual_seed(2)
    straight = net()
    trainer(folder, 3, enable_checkpointing=False).fit(straight, loader())

    torch.manual_seed(2)
    saver = ModelCheckpoint(f"{folder}/saved", save_last=True, every_n_train_steps=6, save_top_k=0)
    trainer(folder, max_epochs=-1, max_steps=6, callbacks=[saver]).fit(net(), loader())
    assert names(f"{folder}/saved") == ["last.ckpt"]

    resumed = net(width=4)
    saver = ModelCheckpoint(f"{folder}/saved", save_last=True, every_n_train_steps=6, save_top_k=0)
    again = trainer(folder, 3, callbacks=[saver])
    again.fit(resumed, loader(), ckpt_path="last")
    assert again.global_step == 3 * BATCHES
    assert equal(weights(resumed), weights(straight))
    other = net()
    torch.manual_seed(3)
    trainer(folder, 3, enable_checkpointing=False).fit(other, loader())  # with other random numbers
    assert not equal(weights(other), weights(straight))

    loaded = Net.load_from_checkpoint(f"{folder}/saved/last.ckpt")
    assert loaded.hparams["width"] == 4
    assert equal(weights(loaded), weights(resumed))


def check_top_k_and_last(folder: str) -> None:
    """Keeps the best two and a copy as last, removes the others, and ``"best"`` finds one of them."""
    saver = ModelCheckpoint(f"{folder}/saved", monitor="falling", save_top_k=2, save_last="link", filename="{epoch}")
    ours = trainer(folder, 4, callbacks=[saver])
    ours.fit(net(), loader())
    assert names(f"{folder}/saved") == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert saver.best_model_path == f"{folder}/saved/epoch=3.ckpt"
    store = TorchCheckpointIO()
    assert store.load_checkpoint(saver.last_model_path)["global_step"] == 16
    assert store.is_complete(saver.best_model_path)
    saver.to_yaml()
    assert b"epoch=3.ckpt" in remote.read(f"{folder}/saved/best_k_models.yaml")
    other = ModelCheckpoint(
        f"{folder}/saved", monitor="falling", filename="{epoch}"
    )  # of another run: replaces nothing
    trainer(folder, 4, callbacks=[other]).fit(net(), loader())
    assert names(f"{folder}/saved") == [
        "best_k_models.yaml", "epoch=2.ckpt", "epoch=3-v1.ckpt", "epoch=3.ckpt", "last.ckpt",
    ]  # fmt: skip


def check_failures_save(folder: str) -> None:
    """A fit that raises leaves its checkpoint at the address, and the next fit finds it."""
    savers = [OnExceptionCheckpoint(f"{folder}/saved")]
    with pytest.raises(RuntimeError, match="on fire"):
        trainer(folder, callbacks=list(savers)).fit(net(fails_at=5), loader())
    assert "on_exception.ckpt" in names(f"{folder}/saved")
    again = trainer(folder, callbacks=[OnExceptionCheckpoint(f"{folder}/saved")])
    again.fit(net(), loader(), ckpt_path="last")
    assert again.global_step == 2 * BATCHES


def check_upload_that_fails(folder: str, broken: Any) -> None:
    """The upload of the second checkpoint breaks: the first is still there, complete, and the error says what broke."""
    saver = ModelCheckpoint(f"{folder}/saved", save_last=True, save_top_k=0)
    trainer(folder, 1, callbacks=[saver]).fit(net(), loader())
    store = TorchCheckpointIO()
    before = store.load_checkpoint(f"{folder}/saved/last.ckpt")["global_step"]
    saver = ModelCheckpoint(f"{folder}/saved", save_last=True, save_top_k=0)
    with broken, pytest.raises(CheckpointError) as caught:
        trainer(folder, 2, callbacks=[saver]).fit(net(), loader(), ckpt_path="last")
    message = str(caught.value)
    assert f"{folder}/saved/last.ckpt" in message
    assert "Connection reset" in message
    assert "What was there before is untouched" in message
    assert names(f"{folder}/saved") == ["last.ckpt"]
    assert store.is_complete(f"{folder}/saved/last.ckpt")
    assert store.load_checkpoint(f"{folder}/saved/last.ckpt")["global_step"] == before == BATCHES
    saver = ModelCheckpoint(f"{folder}/saved", save_last=True, save_top_k=0)
    again = trainer(folder, 2, callbacks=[saver])  # with the connection back
    again.fit(net(), loader(), ckpt_path="last")
    assert store.load_checkpoint(f"{folder}/saved/last.ckpt")["global_step"] == 2 * BATCHES


def check_root(folder: str, working: Path) -> None:
    """``default_root_dir`` alone: logs, hyperparameters and checkpoints of each run lie below it, and nothing here."""
    with no_local_files(working):
        for version in (0, 1):
            ours = trainer(folder, logger=True)
            ours.fit(net(), loader())
            assert ours.log_dir == f"{folder}/lightning_logs/version_{version}"
            assert names(f"{ours.log_dir}/checkpoints") == ["epoch=1-step=8.ckpt"]
            assert "hparams.yaml" in names(ours.log_dir)
            assert b"width: 4" in remote.read(f"{ours.log_dir}/hparams.yaml")
    assert names(f"{folder}/lightning_logs") == ["version_0", "version_1"]


def lost_connection(system: type) -> Any:
    """Context in which a file system loses its connection when the second half of a file is uploaded."""

    def put_file(self: Any, lpath: str, rpath: str, **kwargs: Any) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    return mock.patch.object(system, "put_file", put_file)


def clear(folder: str) -> None:
    system, path = fsspec.core.url_to_fs(folder)
    if system.exists(path):
        system.rm(path, recursive=True)


def with_variables(variables: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` with these environment variables."""
    with mock.patch.dict(os.environ, variables):
        return function(*args)


def fit_on_ranks(folder: str, steps: int | None = None, ckpt_path: str | None = None) -> list[Tensor]:
    """One rank of a fit with two processes, of ``steps`` steps if given; return its weights."""
    torch.manual_seed(2)
    module = net()
    torch.manual_seed(2)
    limits = {} if steps is None else {"max_epochs": -1, "max_steps": steps}
    saver = ModelCheckpoint(f"{folder}/saved{'' if steps or ckpt_path else '-straight'}", save_last=True, save_top_k=0)
    ours = trainer(folder, **{"strategy": "ddp", "devices": 2, "callbacks": [saver], **limits})
    ours.fit(module, loader(), ckpt_path=ckpt_path)
    return weights(module)


class Plain(LightningModule):
    """Ends with the same weights on any number of processes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit_sharded(folder: str, epochs: int, name: str, ckpt_path: str | None = None) -> list[Tensor]:
    """One rank of a fit that saves a folder of shards, ``<name>.ckpt``, when it ends; return the complete weights."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    data = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24)
    batches = DataLoader(data, batch_size=4 // world)
    strategy = FSDPStrategy(state_dict_type="sharded")
    ours = trainer(folder, epochs, strategy=strategy, devices=world, enable_checkpointing=False)
    ours.fit(Plain(), batches, ckpt_path=ckpt_path)
    ours.save_checkpoint(f"{folder}/{name}.ckpt")
    state = ours.strategy.lightning_module_state_dict()
    full = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state.values()]
    return [value.detach().clone() for value in full]
