from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.trainer.checkpoint import resolve_path


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


@pytest.mark.parametrize("saver", ["OnExceptionCheckpoint", "ModelCheckpoint(save_on_exception=True)"])
@pytest.mark.parametrize("where", ["in the first window", "in set-up", "in a trial run", "without an exception"])
def test_an_exception_before_the_first_step_is_one_line(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, caplog: Any, saver: str, where: str
) -> None:
    class Failing(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if where == "in set-up":
                raise RuntimeError("broken")

    own: Any = OnExceptionCheckpoint(tmp_path)
    callback = own if saver == "OnExceptionCheckpoint" else ModelCheckpoint(tmp_path, save_on_exception=True)
    module = breaking()
    module.at = 0 if where != "without an exception" else 99
    trainer = make_trainer(
        callbacks=[Failing(), callback], enable_checkpointing=True, accumulate_grad_batches=2,
        fast_dev_run=where == "in a trial run",
    )  # fmt: skip
    fails = where != "without an exception"
    with caplog.at_level(logging.INFO, logger="drivetrain"), pytest.raises(RuntimeError) if fails else nullcontext():
        trainer.fit(module, loader)
    told = [record.message for record in caplog.records if "saved nothing" in record.message]
    expected = f"{saver} saved nothing: the exception came before the first optimizer step of this fit"
    assert len(told) == (where in ("in the first window", "in set-up"))
    assert all(message.startswith(expected) for message in told)
    assert bool(list(tmp_path.glob("*.ckpt"))) == (not fails and saver != "OnExceptionCheckpoint")


def test_t58_nothing_is_saved_when_a_second_fit_fails_before_it_trains(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    """The steps that the Trainer counts by then are the first fit's, and the model may be half set up."""

    class Breaks(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step:
                raise RuntimeError("in set-up")

    module, callback = breaking(), OnExceptionCheckpoint(tmp_path)
    module.error = None
    trainer = make_trainer(callbacks=[Breaks(), callback], enable_checkpointing=True)
    trainer.fit(module, loader)
    with pytest.raises(RuntimeError, match="in set-up"):
        trainer.fit(module, loader)
    assert not os.path.exists(callback.ckpt_path)


def test_nothing_is_saved_in_fast_dev_run_and_outside_of_a_fit(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    class Broken(validated):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("broken")

        def on_train_end(self) -> None:
            if self.trainer.fast_dev_run:
                raise RuntimeError("broken")

    callback = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(fast_dev_run=2, callbacks=callback, enable_checkpointing=True).fit(Broken(), loader, loader)
    trainer = make_trainer(callbacks=callback, enable_checkpointing=True)
    trainer.fit(Broken(), loader, loader)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.test(dataloaders=loader)
    assert not os.path.exists(callback.ckpt_path)


def test_an_exception_in_validation_is_one_too(
    validated: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path
) -> None:
    class Broken(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("broken")

    callback = OnExceptionCheckpoint(tmp_path, filename="rescue")
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(callbacks=callback, enable_checkpointing=True, num_sanity_val_steps=0).fit(
            Broken(), loader, loader
        )
    assert torch.load(tmp_path / "rescue.ckpt", weights_only=True)["global_step"] == 4


def test_a_save_that_fails_leaves_the_file_before_and_the_first_exception(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = OnExceptionCheckpoint(tmp_path)
    arguments: dict[str, Any] = {"max_epochs": 2, "callbacks": callback, "enable_checkpointing": True}
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(**arguments).fit(breaking(), loader)
    before = Path(callback.ckpt_path).read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("drivetrain.checkpoints.file.os.replace", full)
    with (
        pytest.raises(RuntimeError, match="broken"),
        pytest.warns(UserWarning, match="OnExceptionCheckpoint.on_exception failed: CheckpointError.*disk full"),
    ):
        make_trainer(**arguments).fit(breaking(), loader)
    assert Path(callback.ckpt_path).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["on_exception.ckpt"]


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


@pytest.mark.parametrize("saver", [OnExceptionCheckpoint, partial(ModelCheckpoint, save_on_exception=True)])
def test_t57_saving_on_exceptions_is_refused_with_several_processes(
    breaking: Any, loader: DataLoader[Any], make_trainer: Any, tmp_path: Path, saver: Any
) -> None:
    """Before any process is started: a rank that fails alone could not save without the others."""
    trainer = make_trainer(devices=2, strategy="ddp_spawn", callbacks=saver(tmp_path), enable_checkpointing=True)
    with pytest.raises(NotSupportedError, match=r"saves on exceptions.* others would wait for the one that failed"):
        trainer.fit(breaking(), loader)
