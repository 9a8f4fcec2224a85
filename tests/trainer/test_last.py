"""Which checkpoint ``ckpt_path="last"`` means."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.loggers import CSVLogger


class Killed(Exception):
    """Ends a fit as SIGKILL would, which saves nothing."""


class Net(LightningModule):
    def __init__(self, lr: float = 0.1, dies_in: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.dies_in = dies_in
        self.epochs: list[int] = []
        self.layer = torch.nn.Linear(1, 1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.dies_in:
            raise Killed
        self.epochs.append(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Other(Net):
    pass


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def fit(folder: Path, module: Net, saver: ModelCheckpoint | None = None, **arguments: Any) -> Trainer:
    given: dict[str, Any] = {"max_epochs": 4, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", default_root_dir=folder, callbacks=saver or ModelCheckpoint(), **{**given, **arguments}
    )
    with suppress(Killed):
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 1)), 2), ckpt_path="last")
    return trainer


@pytest.mark.parametrize("last", [None, True, "link"])
@pytest.mark.parametrize("reads_log_dir", [False, True])
def test_it_lies_in_the_folder_of_any_run_of_this_program(tmp_path: Path, last: Any, reads_log_dir: bool) -> None:
    def logger() -> CSVLogger:
        made = CSVLogger(tmp_path)
        assert not reads_log_dir or made.log_dir  # which decides the run's folder before the fit
        return made

    for dies_in, first in ((2, 0), (3, 2), (-1, 3)):  # the third start resumes what the second one has saved
        module = Net(dies_in=dies_in)
        fit(tmp_path, module, ModelCheckpoint(save_last=last), logger=logger())
        assert module.epochs == list(range(first, 4 if dies_in < 0 else dies_in))


@pytest.mark.parametrize("other", [Net(lr=0.2), Other(), "arguments"], ids=["lr", "class", "arguments"])
def test_another_program_or_configuration_is_not_resumed(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr=1", "data", "--resume", "--max-epochs", "4"])
    fit(tmp_path, Net(dies_in=2), logger=CSVLogger(tmp_path))
    if other == "arguments":
        monkeypatch.setattr(sys, "argv", ["train.py", "--lr=2", "data"])
        other = Net()
    fit(tmp_path, other, logger=CSVLogger(tmp_path), max_epochs=1)
    assert other.epochs == [0]
    named = [str(each.message) for each in recwarn if "no checkpoint was saved with this configuration" in str(each)]
    assert len(named) == (not isinstance(other, Other))  # those of another program are not this one's
    assert all("version_0/checkpoints/epoch=1-step=4.ckpt" in each for each in named)


def test_how_long_and_from_where_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--lr=1", "data"])
    fit(tmp_path, Net(dies_in=2), logger=CSVLogger(tmp_path))
    words = ["fit", "--max-epochs", "9", "--lr=1", "data", "--ckpt_path=last", "--local-rank=1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    module = Net()
    fit(tmp_path, module, logger=CSVLogger(tmp_path))
    assert module.epochs == [2, 3]


def test_a_fit_after_one_that_has_ended_is_another_run(tmp_path: Path) -> None:
    first, second = Net(), Net()
    fit(tmp_path, first, logger=CSVLogger(tmp_path))
    with warnings.catch_warnings():  # its checkpoints are not of another configuration
        warnings.simplefilter("error")
        fit(tmp_path, second, logger=CSVLogger(tmp_path))
    assert first.epochs == second.epochs == [0, 1, 2, 3]


def test_a_checkpoint_that_does_not_say_which_fit_has_saved_it_is_of_this_one(tmp_path: Path) -> None:
    fit(tmp_path, Net(dies_in=2), logger=CSVLogger(tmp_path))
    (path,) = tmp_path.rglob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["program"]["fit"]
    torch.save(checkpoint, path)
    module = Net()
    fit(tmp_path, module, logger=CSVLogger(tmp_path))
    assert module.epochs == [2, 3]


def test_a_version_that_was_given_is_a_run_of_its_own(tmp_path: Path) -> None:
    fit(tmp_path, Net(dies_in=2), logger=CSVLogger(tmp_path, version="a"))
    for version, epochs in (("b", [0, 1]), ("a", [2, 3])):
        module = Net(dies_in=2 if version == "b" else -1)
        fit(tmp_path, module, logger=CSVLogger(tmp_path, version=version))
        assert module.epochs == epochs


def saved(tmp_path: Path) -> Path:
    fit(tmp_path, Net(dies_in=2), ModelCheckpoint(tmp_path / "kept", save_top_k=-1), logger=False)
    for name, time in (("epoch=0-step=2.ckpt", 1e9), ("epoch=1-step=4.ckpt", 2e9)):
        os.utime(tmp_path / "kept" / name, (time, time))
    return tmp_path / "kept"


def unfinished(folder: Path) -> str:
    (folder / "stopped.ckpt").mkdir()
    (folder / "stopped.ckpt" / "3f9a1c20.rank0.bin").write_bytes(b"0123")
    return r"the save of .*stopped\.ckpt was not finished"


def damaged(folder: Path) -> str:
    content = bytearray((folder / "epoch=1-step=4.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "epoch=1-step=4.ckpt").write_bytes(content[:-50])
    os.utime(folder / "epoch=1-step=4.ckpt", (2e9, 2e9))
    return r"epoch=1-step=4\.ckpt cannot be read"


def weights(folder: Path) -> str:
    checkpoint = TorchCheckpointIO().load_checkpoint(folder / "epoch=1-step=4.ckpt")
    del checkpoint["optimizer_states"]
    TorchCheckpointIO().save_checkpoint(checkpoint, folder / "weights.ckpt")
    return r"weights\.ckpt holds only weights"


@pytest.mark.parametrize("make", [unfinished, damaged, weights])
def test_what_cannot_be_resumed_from_is_passed_over_and_named(tmp_path: Path, make: Any) -> None:
    folder = saved(tmp_path)
    named = make(folder)
    made = set(folder.iterdir()) - {folder / "epoch=0-step=2.ckpt", folder / "epoch=1-step=4.ckpt"}
    for path in made:
        os.utime(path, (3e9, 3e9))
    module = Net()
    with pytest.warns(UserWarning, match=f"passes over .*{named}.* The newest complete checkpoint is taken: "):
        fit(tmp_path, module, ModelCheckpoint(folder, save_top_k=-1), logger=False)
    assert module.epochs == ([1, 2, 3] if make is damaged else [2, 3])


def test_without_a_finished_save_a_fit_begins_and_a_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    named = unfinished(tmp_path / "kept")
    module, loader = Net(), DataLoader(TensorDataset(torch.ones(4, 1)), 2)
    with pytest.warns(UserWarning, match=f"{named}, so training starts from the beginning"):
        fit(tmp_path, module, ModelCheckpoint(tmp_path / "kept"), logger=False)
    assert module.epochs == [0, 1, 2, 3]
    shutil.rmtree(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    unfinished(tmp_path / "kept")
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=ModelCheckpoint(tmp_path / "kept"))
    with pytest.raises(CheckpointError, match=f"names no checkpoint: {named}"):
        trainer.validate(Validated(), loader, ckpt_path="last")


def test_with_damaged_files_alone_it_is_an_error_and_no_start_from_zero(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "epoch=0-step=2.ckpt").unlink()
    named = damaged(folder)
    with pytest.raises(CheckpointError, match=f"{named}.*and there is no complete checkpoint"):
        fit(tmp_path, Net(), ModelCheckpoint(folder), logger=False)
