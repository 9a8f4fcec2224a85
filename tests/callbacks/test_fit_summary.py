"""The lines at the end of a fit."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Callback, Trainer
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint, PlainProgressBar, Timer
from drivetrain.compat.boring_classes import BoringModel
from drivetrain.loggers import CSVLogger


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Scored(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.trainer.current_epoch))


class Stops(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = True


def lines(caplog: pytest.LogCaptureFixture, module: BoringModel | None = None, **arguments: Any) -> list[str]:
    """The lines that a fit of two batches an epoch logs at its end."""
    given = {"logger": False, "enable_checkpointing": False, "max_epochs": 2, "limit_val_batches": 1, **arguments}
    caplog.clear()
    caplog.set_level("INFO", "drivetrain")
    Trainer(accelerator="cpu", enable_model_summary=False, limit_train_batches=2, **given).fit(module or BoringModel())
    at = next((i for i, line in enumerate(caplog.messages) if line.startswith("The fit took")), len(caplog.messages))
    return caplog.messages[at:]


def test_three_lines(caplog: pytest.LogCaptureFixture) -> None:
    saver = ModelCheckpoint(monitor="val_loss")
    found = lines(caplog, Scored(), callbacks=saver, enable_checkpointing=True, logger=CSVLogger("."))
    assert re.fullmatch(r"The fit took \d+s and ended after 2 epochs, 4 steps: max_epochs=2 is reached\.", found[0])
    assert found[1] == "Best val_loss: 0, " + str(Path(saver.best_model_path).relative_to(Path.cwd()))
    assert found[2] == (
        'Logs: lightning_logs/version_0. To train on, raise max_epochs: trainer.fit(model, ckpt_path="last")'
    )
    assert len(found) == 3


def test_only_what_applies(caplog: pytest.LogCaptureFixture) -> None:
    assert len(lines(caplog)) == 1
    _, checkpoint, resume = lines(caplog, enable_checkpointing=True)
    assert re.fullmatch(r"Checkpoint: checkpoints/.*\.ckpt", checkpoint)
    assert resume.startswith("To train on, raise max_epochs: ")


def test_weights_alone_cannot_be_resumed(caplog: pytest.LogCaptureFixture) -> None:
    saver = ModelCheckpoint(save_weights_only=True)
    assert len(lines(caplog, callbacks=saver, enable_checkpointing=True)) == 2


def test_the_folder_of_each_logger(caplog: pytest.LogCaptureFixture) -> None:
    found = lines(caplog, logger=[CSVLogger("a"), CSVLogger("b", "digits")])
    assert found[-1] == "Logs: a/lightning_logs/version_0, b/digits/version_0"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_steps": 3}, "2 epochs, 3 steps: max_steps=3 is reached."),
        ({"max_steps": 1}, "1 epoch, 1 step: max_steps=1 is reached."),
        ({"callbacks": Stops()}, "1 epoch, 1 step: it was asked to stop."),
        ({"callbacks": Timer(timedelta(microseconds=1))}, "1 epoch, 1 step: its time is over."),
        (
            {"callbacks": EarlyStopping("val_loss", patience=1), "max_epochs": 9},
            "EarlyStopping('val_loss') stopped it.",
        ),
    ],
)
def test_why_it_ended(caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], reason: str) -> None:
    found = lines(caplog, Scored(), **arguments)
    assert found[0].endswith(reason)


def test_how_to_train_on_after_early_stopping_does_train_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def ends(patience: int, **resume: Any) -> list[str]:
        caplog.clear()
        callbacks = [ModelCheckpoint(tmp_path), EarlyStopping("val_loss", patience=patience)]
        trainer = Trainer(accelerator="cpu", max_epochs=9, limit_train_batches=1, logger=False, callbacks=callbacks)
        trainer.fit(Scored(), **resume)
        return caplog.messages[-3:]

    caplog.set_level("INFO", "drivetrain")
    first, _, how = ends(1)
    assert "after 2 epochs, 2 steps: EarlyStopping('val_loss') stopped it." in first
    assert how == 'To train on, raise its patience: trainer.fit(model, ckpt_path="last")'
    assert "after 3 epochs, 3 steps: EarlyStopping('val_loss') stopped it." in ends(2, ckpt_path="last")[0]


def test_a_fit_that_trains_nothing_has_no_summary(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, max_epochs=0) == []


@pytest.mark.parametrize("arguments", [{"enable_progress_bar": False}, {"callbacks": PlainProgressBar(refresh_rate=0)}])
def test_without_a_bar_there_are_no_lines(caplog: pytest.LogCaptureFixture, arguments: dict[str, Any]) -> None:
    assert lines(caplog, **arguments) == []


def test_a_fit_that_fails_has_no_summary(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        lines(caplog, Fails())
    assert "The fit took" not in caplog.text
