from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.checkpoint import resolve_path
from drivetrain.errors import ConfigurationError


@pytest.fixture
def breaking(regression: Any) -> Any:
    class Breaking(regression):  # type: ignore[misc]
        error: BaseException | None = RuntimeError("broken")
        at = 6

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.error is not None and self.global_step == self.at:
                raise self.error
            return self.loss(batch)

    return Breaking


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_run_that_fails_leaves_its_state(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, caplog: Any, error: BaseException
) -> None:
    module, callback = breaking(), OnExceptionCheckpoint(tmp_path / "saved")
    module.error = error
    with caplog.at_level(logging.INFO, logger="drivetrain"), pytest.raises((RuntimeError, SystemExit)):
        make_trainer(max_epochs=2, callbacks=callback, enable_checkpointing=True).fit(module, loader)

    assert callback.ckpt_path == str(tmp_path / "saved" / "on_exception.ckpt")
    saved = torch.load(callback.ckpt_path, weights_only=True)
    assert saved["global_step"] == 6
    assert torch.equal(saved["state_dict"]["net.0.weight"], module.net[0].weight)
    assert f"Saved {callback.ckpt_path}" in caplog.text


def test_nothing_is_saved_before_the_first_step_or_without_an_exception(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    module, callback = breaking(), OnExceptionCheckpoint(tmp_path)
    module.at = 0
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(callbacks=callback, enable_checkpointing=True).fit(module, loader)
    module.error = None
    make_trainer(callbacks=callback, enable_checkpointing=True).fit(module, loader)

    assert list(tmp_path.glob("*.ckpt")) == []
    assert callback.resume_candidates(make_trainer()) == []


def test_t28_last_means_whatever_was_written_last(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    checkpoint, rescue = ModelCheckpoint(tmp_path, save_last=True), OnExceptionCheckpoint(tmp_path)
    module = breaking()
    trainer = make_trainer(max_epochs=2, callbacks=[checkpoint, rescue], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(module, loader)
    os.utime(checkpoint.last_model_path, ns=(1, 1))

    module.error = None
    assert resolve_path(trainer, "last", None) == rescue.ckpt_path
    os.utime(rescue.ckpt_path, ns=(0, 0))
    assert resolve_path(trainer, "last", None) == checkpoint.last_model_path


@pytest.mark.parametrize("wrong", ["", None, 3])
def test_a_file_needs_a_name(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match='Write filename="on_exception"'):
        OnExceptionCheckpoint(tmp_path, wrong)
