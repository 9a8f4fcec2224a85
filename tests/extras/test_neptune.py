"""NeptuneLogger with the real client, in its mode that keeps everything in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extras.logged import Net, loader, trainer

from drivetrain.loggers import NeptuneLogger

pytestmark = pytest.mark.filterwarnings("ignore")  # the client's own, of its packages and of the machine


def test_a_fit_logs_values_and_hyperparameters(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # where the client keeps its files
    logger = NeptuneLogger(mode="debug", name="first", capture_stdout=False, capture_stderr=False)
    trainer(tmp_path, logger).fit(Net(rates={"lr": 0.1}), loader())
    run = logger.experiment
    assert run is logger.run
    assert run.exists("training/loss_step")
    assert run.exists("training/loss_epoch")
    assert run["training/hyperparams/rates/lr"].fetch() == 0.1
    logger.log_image("picture", [np.zeros((4, 4))])
    assert run.exists("training/picture")
    logger.log_model_summary(Net())
    run.stop()


def test_a_resumed_fit_continues_the_run_whose_id_is_known(monkeypatch: Any) -> None:
    first = NeptuneLogger(mode="debug", with_id="RUN-7")
    assert first.state_dict() == {"run_id": "RUN-7"}
    asked: list[Any] = []
    monkeypatch.setattr("neptune.init_run", lambda **arguments: asked.append(arguments) or {})
    second = NeptuneLogger(mode="debug")
    second.load_state_dict(first.state_dict())
    _ = second.experiment
    assert asked[0]["with_id"] == "RUN-7"
