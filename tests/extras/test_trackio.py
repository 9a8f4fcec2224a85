"""TrackioLogger with the real package, offline: what was logged is read from its database."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extras.logged import Net, cut_and_resumed, loader, trainer

from drivetrain.loggers import TrackioLogger

storage = pytest.importorskip("trackio.sqlite_storage")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the package's own


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in [each for name, each in sys.modules.items() if name.startswith("trackio")]:
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def stored(name: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = storage.SQLiteStorage.get_logs("digits", name)
    return found


def test_a_fit_logs_values_and_hyperparameters(folder: Path) -> None:
    logger = TrackioLogger("digits", prefix="a")
    trainer(folder, logger).fit(Net(rates={"lr": 0.1}), loader())
    logger.log_image("picture", [np.zeros((4, 4, 3), "uint8")], step=4)
    logger.finalize("success")
    assert [row["step"] for row in stored(logger.version) if "a-loss_step" in row] == [0, 1, 2, 3]
    assert storage.SQLiteStorage.get_run_config("digits", logger.version)["rates/lr"] == 0.1


def test_a_resumed_fit_continues_the_run(folder: Path) -> None:
    first, second = cut_and_resumed(folder, lambda: TrackioLogger("digits"))
    assert first.version == second.version
    steps = [row["step"] for row in stored(first.version) if "loss_step" in row]
    assert {*range(12)} == {*steps}
