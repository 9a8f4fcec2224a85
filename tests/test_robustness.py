"""What an exception or Ctrl-C in the middle of a run leaves usable: the checkpoint, the loggers, the module."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.loggers import CSVLogger, TensorBoardLogger

pytestmark = pytest.mark.filterwarnings("ignore:Modules in eval mode")  # Net has one on purpose
EPOCHS, STEPS = 3, 4  # of a whole fit, and of an epoch
DATASET = TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)


class Failing(Exception):
    """What the tests raise."""


class Net(LightningModule):
    """Logs its loss at every step; ``spots`` says where it fails: ``{"training_step": (epoch, batch_idx)}``."""

    def __init__(self, spots: dict[str, tuple[int, int]] | None = None, error: type[BaseException] = Failing) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 1))
        self.net[1].eval()  # a mode of its own, which no evaluation may change
        self.spots, self.error = spots or {}, error

    def here(self, spot: str, batch_idx: int = 0) -> None:
        if self.spots.get(spot) == (self.current_epoch, batch_idx):
            raise self.error(spot)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.here("training_step", batch_idx)
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.here("validation_step", batch_idx)
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.here("predict_step", batch_idx)
        return self.net(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.here("on_before_optimizer_step", self.trainer.progress.batch_idx)

    def on_train_epoch_end(self) -> None:
        self.here("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watching(Callback):
    """Fails in its own hooks, where the module is told to, and keeps what the run looked like at the last save."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.here("callback", batch_idx)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.here("on_validation_start")


class Batches:
    """A loader that fails where the module is told to."""

    def __init__(self, module: Net) -> None:
        self.module = module

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(DataLoader(DATASET, batch_size=2)):
            self.module.here("loader", index)
            yield batch


def trainer_in(path: Path, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": EPOCHS, "log_every_n_steps": 1, "default_root_dir": path,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def logged_steps(logger: Any) -> list[int]:
    """The steps at which the loss stands in the logger's own file."""
    if isinstance(logger, CSVLogger):
        with open(logger.metrics_file_path, newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return [event.step for event in events.Scalars("loss")]


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


# ---- an exception or Ctrl-C in the middle ----------------------------------------------------------------------------

# where it fails, after the first epoch's checkpoint, and how many steps have been flushed until then
SPOTS = [
    ("training_step", (1, 2), 6),
    ("on_before_optimizer_step", (1, 2), 6),
    ("callback", (1, 2), 6),
    ("loader", (1, 2), 6),
    ("loader", (1, 0), 4),
    ("on_validation_start", (1, 0), 8),
    ("validation_step", (1, 1), 8),
    ("on_train_epoch_end", (1, 0), 8),
]


@pytest.mark.parametrize("error", [Failing, KeyboardInterrupt])
@pytest.mark.parametrize(("spot", "where", "flushed"), SPOTS, ids=[f"{spot} {where}" for spot, where, _ in SPOTS])
def test_the_last_checkpoint_is_usable_and_the_loggers_are_flushed(
    spot: str, where: tuple[int, int], flushed: int, error: type[BaseException], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    model = Net({spot: where}, error)
    before, handler = modes(model), signal.getsignal(signal.SIGINT)
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tensorboard")]
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1)
    trainer = trainer_in(tmp_path, logger=loggers, callbacks=[Watching(), checkpoint])
    with pytest.raises(SystemExit if error is KeyboardInterrupt else Failing):
        trainer.fit(model, Batches(model), DataLoader(DATASET, batch_size=2))

    # the loggers
    assert [logged_steps(logger) for logger in loggers] == [list(range(flushed))] * 2
    # the process
    assert trainer.interrupted
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    # the module
    assert modes(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.loss(DATASET[:2]).requires_grad
    # the checkpoint of the first epoch
    paths = sorted((tmp_path / "checkpoints").iterdir())
    assert str(paths[0]) == os.path.join(tmp_path, "checkpoints", "epoch=0-step=4.ckpt")
    assert [path.suffix for path in paths] == [".ckpt"] * len(paths)  # nothing half written
    assert checkpoint.best_model_path == str(paths[-1])
    for path in paths:
        saved = TorchCheckpointIO().load_checkpoint(path)
        loaded = Net.load_from_checkpoint(path)
        assert all(torch.equal(saved["state_dict"][name], value) for name, value in loaded.state_dict().items())
    resumed = trainer_in(tmp_path, logger=False, callbacks=[ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1)])
    resumed.fit(fresh := Net(), Batches(fresh), DataLoader(DATASET, batch_size=2), ckpt_path=paths[0])
    assert (resumed.current_epoch, resumed.global_step) == (EPOCHS, EPOCHS * STEPS)
    # the Trainer
    model.spots = {}
    trainer.fit(model, Batches(model), DataLoader(DATASET, batch_size=2))
    assert not trainer.interrupted
    assert trainer.current_epoch == EPOCHS


def test_resuming_from_the_checkpoint_gives_what_an_undisturbed_run_gives(tmp_path: Path) -> None:
    torch.manual_seed(3)
    undisturbed, broken = Net(), Net({"training_step": (1, 2)})
    broken.load_state_dict(undisturbed.state_dict())
    resumed = Net()
    for model, path, succeeds in ((undisturbed, None, True), (broken, None, False), (resumed, "last", True)):
        checkpoint = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
        trainer = trainer_in(tmp_path, logger=False, callbacks=[] if model is undisturbed else [checkpoint])
        try:
            trainer.fit(model, Batches(model), DataLoader(DATASET, batch_size=2), ckpt_path=path)
        except Failing:
            assert not succeeds
    for name, value in undisturbed.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)


@pytest.mark.parametrize(("error", "raised"), [(OSError, CheckpointError), (KeyboardInterrupt, SystemExit)])
def test_a_checkpoint_that_is_cut_short_leaves_the_one_before(
    error: type[BaseException], raised: type[BaseException], tmp_path: Path, monkeypatch: Any
) -> None:
    """The disk fills up, or Ctrl-C comes, while the second epoch's checkpoint is being written."""
    whole, written = torch.save, []

    def cut_short(obj: Any, stream: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(obj, dict) and "state_dict" in obj:
            written.append(obj)
            if len(written) == 2:
                stream.write(b"PK half of it")
                raise error("cut short")
        whole(obj, stream, *args, **kwargs)

    monkeypatch.setattr(torch, "save", cut_short)
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=1)
    trainer = trainer_in(tmp_path, logger=False, callbacks=[checkpoint])
    with pytest.raises(raised):
        trainer.fit(Net(), DataLoader(DATASET, batch_size=2), DataLoader(DATASET, batch_size=2))
    assert len(written) == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["epoch=0-step=4.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "checkpoints" / "epoch=0-step=4.ckpt")
    assert TorchCheckpointIO().load_checkpoint(checkpoint.best_model_path)["global_step"] == STEPS


@pytest.mark.parametrize("error", [Failing, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("entry", "spot"), [("validate", "validation_step"), ("test", "validation_step"), ("predict", "predict_step")]
)
def test_an_evaluation_that_fails_leaves_modes_and_switches_as_they_were(
    entry: str, spot: str, error: type[BaseException], tmp_path: Path
) -> None:
    model = Net({spot: (0, 1)}, error)
    before = modes(model)
    trainer = trainer_in(tmp_path, logger=CSVLogger(tmp_path), deterministic=True)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else Failing):
        getattr(trainer, entry)(model, DataLoader(DATASET, batch_size=2))
    assert modes(model) == before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    model.spots = {}
    assert getattr(trainer, entry)(model, DataLoader(DATASET, batch_size=2))


@pytest.mark.parametrize("second", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_party_that_fails_while_cleaning_up_hides_neither_the_error_nor_the_loggers(
    tmp_path: Path, second: type[BaseException]
) -> None:
    class Fails(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            raise second("the second one")

    logger = CSVLogger(tmp_path)
    trainer = trainer_in(tmp_path, logger=logger, callbacks=[Fails()])
    with pytest.raises(Failing), pytest.warns(UserWarning, match=f"on_exception failed: {second.__name__}"):
        trainer.fit(Net({"training_step": (1, 2)}), DataLoader(DATASET, batch_size=2), [])
    assert logged_steps(logger) == list(range(6))
