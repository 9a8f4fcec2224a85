"""AsyncCheckpointIO: what a save copies, when it is durable, how it fails, and a run that uses it."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.plugins import AsyncCheckpointIO


class Slow(TorchCheckpointIO):
    """Writes when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write, self.fails = threading.Event(), False

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.may_write.wait(30)
        if self.fails:
            raise ValueError("out of tape")
        super().save_checkpoint(checkpoint, path, storage_options)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.tied = self.layer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(folder: Path, epochs: int, *plugins: Any, **options: Any) -> Net:
    net = Net()
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=list(plugins), callbacks=[ModelCheckpoint(folder, save_last=True)],
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(torch.arange(8.0).reshape(4, 2)), batch_size=2), **options)
    return net


def test_a_save_returns_before_it_is_written_and_holds_the_values_of_that_moment(tmp_path: Path) -> None:
    inner = Slow()
    store, weight, path = AsyncCheckpointIO(inner), torch.ones(2), tmp_path / "a.ckpt"
    store.save_checkpoint({"weight": weight, "again": weight.view(2), "rest": [1, {"name": "x"}]}, path)
    weight.zero_()  # training goes on
    assert not store.is_durable(path)
    assert not store.exists(path)
    inner.may_write.set()
    store.wait(path)
    assert store.is_durable(path)
    found = store.load_checkpoint(path)
    assert torch.equal(found["weight"], torch.ones(2))
    assert found["rest"] == [1, {"name": "x"}]
    assert found["weight"].data_ptr() == found["again"].data_ptr()  # shared there as well
    store.teardown()


def test_a_copy_of_a_checkpoint_that_is_being_written_follows_it(tmp_path: Path) -> None:
    inner = Slow()
    store, path, last = AsyncCheckpointIO(inner), tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    store.save_checkpoint({"step": 3}, path)
    assert store.copy(path, last)
    assert not last.exists()
    inner.may_write.set()
    store.wait()
    assert store.load_checkpoint(last)["step"] == 3
    assert not store.copy(path, last, replaces=False)
    store.remove_checkpoint(path)
    assert store.find(tmp_path, "*.ckpt") == [str(last)]
    store.teardown()


def test_a_failed_write_is_raised_once_and_names_the_file(tmp_path: Path) -> None:
    inner = Slow()
    inner.fails = True
    inner.may_write.set()
    store, path = AsyncCheckpointIO(inner), tmp_path / "a.ckpt"
    store.save_checkpoint({}, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt could not be written: ValueError: out of tape.*Check Slow"):
        store.wait(path)
    store.wait(path)
    store.teardown()


def test_a_run_with_it_writes_and_resumes_as_one_without(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", 3)
    fit(tmp_path / "async", 2, AsyncCheckpointIO())
    resumed = fit(tmp_path / "async", 3, AsyncCheckpointIO(TorchCheckpointIO()), ckpt_path="last")
    assert sorted(each.name for each in (tmp_path / "async").iterdir()) == ["epoch=2-step=6.ckpt", "last.ckpt"]
    assert torch.equal(resumed.layer.weight, plain.layer.weight)
    assert not torch.equal(plain.layer.weight, Net().layer.weight)


def test_a_checkpoint_without_tensors_is_saved(tmp_path: Path) -> None:
    store = AsyncCheckpointIO()
    store.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
    store.wait()
    assert store.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}
    store.teardown()


def test_the_pipes_of_a_process_that_has_died_are_closed(tmp_path: Path) -> None:
    store = AsyncCheckpointIO()
    store.start()
    assert store._writer is not None
    process = store._writer._process
    process.kill()
    store.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
    store.wait()
    assert store.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}
    assert process.stdin is not None
    assert process.stdout is not None
    assert (process.stdin.closed, process.stdout.closed) == (True, True)
    store.teardown()


def test_it_can_be_pickled_and_wants_a_store() -> None:
    store = pickle.loads(pickle.dumps(AsyncCheckpointIO()))
    assert isinstance(store.checkpoint_io, TorchCheckpointIO)
    with pytest.raises(ConfigurationError, match="TorchCheckpointIO"):
        AsyncCheckpointIO("files")  # type: ignore[arg-type]
