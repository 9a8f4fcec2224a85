"""What the report on a failed rank shows: the user's lines, and the error last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import LightningModule, Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.launchers.board import Board
from drivetrain.launchers.tracebacks import traceback_of_user
from drivetrain.strategies import SingleDeviceStrategy

FIT = "in fits"
STEP = "in training_step"


class Fails(LightningModule):
    def __init__(self, fail: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fail = fail

    def training_step(self, batch: Any) -> Any:
        return self.fail()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fits(tmp_path: Path, fail: Callable[[], Any]) -> str:
    module = Fails(fail)
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    try:
        trainer.fit(module, [torch.rand(2, 4)])
    except Exception as error:
        return traceback_of_user(error)
    raise AssertionError("it has not failed")


def wrong_shape() -> Any:
    return torch.nn.functional.linear(torch.rand(2, 3), torch.rand(1, 4))


def refused() -> Any:
    raise ConfigurationError("Write this.")


def test_frames_above_the_innermost_line_of_the_user_are_the_users(tmp_path: Path) -> None:
    text = fits(tmp_path, wrong_shape)
    assert FIT in text
    assert STEP in text
    assert "shapes cannot be multiplied" in text
    assert "/drivetrain/loops/" not in text


def test_an_error_of_drivetrain_shows_lines_of_the_user_alone(tmp_path: Path) -> None:
    text = fits(tmp_path, refused)
    assert STEP in text
    assert "/src/drivetrain/" not in text
    assert text.endswith("drivetrain.errors.ConfigurationError: Write this.\n")
    assert traceback_of_user(ConfigurationError("Write this.")) == (
        "drivetrain.errors.ConfigurationError: Write this.\n"
    )


def test_what_the_strategy_explains_is_raised_and_hides_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained = ConfigurationError("The cure.")
    monkeypatch.setattr(SingleDeviceStrategy, "explain", lambda self, error: explained)
    text = fits(tmp_path, wrong_shape)
    assert "shapes cannot be multiplied" not in text
    assert text.endswith("drivetrain.errors.ConfigurationError: The cure.\n")
    assert isinstance(explained.__context__, RuntimeError)  # for a debugger


def test_the_error_is_the_last_line_of_a_report(tmp_path: Path) -> None:
    report = Board(tmp_path, range(2), 2).report(1, 77, "raised E: why\nThat was", "E: why\n")
    assert report.splitlines()[0] == "Rank 1 of 2 (process 77) raised E: why"
    assert report.splitlines()[-2:] == ["Rank 0 was before its first run.", "E: why"]
