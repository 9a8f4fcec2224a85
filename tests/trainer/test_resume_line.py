"""A resumed fit says where it continues and what differs, and resumes by itself where the environment asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import ConfigurationError
from drivetrain.trainer.resume_line import ENTRY


class Fits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.batches = nn.Linear(2, 1), 0

    def training_step(self, batch: Any) -> Any:
        self.batches += 1
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Fails(Callback):
    """Ends the fit by an exception, as a kill would, after so many batches."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("on purpose")


def fit(folder: Path, *callbacks: Callback, saves: bool = True, **arguments: Any) -> Fits:
    savers = [ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)] if saves else []
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=saves, default_root_dir=folder, callbacks=[*savers, *callbacks],
        **{name: value for name, value in arguments.items() if name != "ckpt_path"},
    )  # fmt: skip
    trainer.fit(module := Fits(), DataLoader(TensorDataset(torch.ones(10, 2)), 2), ckpt_path=arguments.get("ckpt_path"))
    return module


def test_the_line_names_the_sample_and_what_differs(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, Fails(8))
    saved = (store := TorchCheckpointIO()).load_checkpoint(tmp_path / "last.ckpt")
    changed = {**saved, ENTRY: {**saved[ENTRY], "torch": "1.0", "device": "tpu"}}
    store.save_checkpoint(changed, tmp_path / "changed.ckpt")
    with caplog.at_level("INFO"):
        fit(tmp_path, ckpt_path=tmp_path / "changed.ckpt", gradient_clip_val=0.5)
    [line] = [each for each in caplog.messages if each.startswith("Resuming from")]
    assert "changed.ckpt: epoch 1, after batch 1 (counted from 0; 4 samples), global step 7. Other than in the" in line
    assert line.endswith(
        f"torch {torch.__version__} (was 1.0), device cpu (was tpu), gradient_clip_val 0.5 (was None)."
    )


def test_nothing_differs_in_the_same_command(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, Fails(5))
    with caplog.at_level("INFO"):
        fit(tmp_path, ckpt_path="last")
    [line] = [each for each in caplog.messages if each.startswith("Resuming from")]
    assert line.endswith("last.ckpt: epoch 0, after batch 3 (counted from 0; 8 samples), global step 4.")


def test_a_program_that_was_not_written_for_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_RESUME", "auto")
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, Fails(7))  # there is no checkpoint yet: it begins at the start
    assert fit(tmp_path).batches == 4
    assert fit(tmp_path, saves=False).batches == 10  # a fit without checkpoints has nothing to resume from


def test_without_the_variable_it_begins_again(tmp_path: Path) -> None:
    """The control."""
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, Fails(7))
    assert fit(tmp_path).batches == 10


def test_another_value_of_the_variable_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_RESUME", "yes")
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_RESUME is 'yes'. Set it to auto"):
        fit(tmp_path)
