"""CometLogger with the real comet_ml, offline: what was logged is read from its archive."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extras.logged import Net, cut_and_resumed, loader, trainer

from drivetrain.loggers import CometLogger


@pytest.fixture
def make(tmp_path: Path) -> Any:
    quiet: dict[str, Any] = {
        "log_git_metadata": False, "log_git_patch": False, "log_env_details": False, "log_code": False,
        "auto_output_logging": "", "display_summary_level": 0,
    }  # fmt: skip
    return lambda **arguments: CometLogger(online=False, offline_directory=str(tmp_path), **{**quiet, **arguments})


def messages(folder: Path, key: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob(f"*{key}*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
            found += [json.loads(line) for line in lines]
    return found


def steps(folder: Path, key: str, name: str) -> list[int]:
    payloads = [message["payload"] for message in messages(folder, key) if message["type"] == "metric_msg"]
    return [one["metric"]["step"] for one in payloads if one["metric"]["metricName"] == name]


@pytest.mark.filterwarnings("ignore:.*path should be string:DeprecationWarning")  # comet_ml's own
def test_a_fit_logs_values_hyperparameters_and_media(make: Any, tmp_path: Path) -> None:
    logger = make(prefix="a", name="first")
    trainer(tmp_path, logger).fit(Net(rates={"lr": 0.1}), loader())
    logger.log_image("picture", [np.arange(48, dtype="uint8").reshape(4, 4, 3)], step=1)
    logger.log_text("words", columns=["a"], data=[["b"]])
    logger.experiment.end()
    assert steps(tmp_path, logger.version, "a-loss_step") == [0, 1, 2, 3]
    text = json.dumps(messages(tmp_path, logger.version))
    assert '"rates/lr"' in text
    assert "picture" in text


def test_a_resumed_fit_continues_the_experiment(make: Any, tmp_path: Path) -> None:
    first, second = cut_and_resumed(tmp_path, make, lambda logger: logger.experiment.end())
    assert first.version == second.version
    archives = sorted(tmp_path.glob(f"*{first.version}*.zip"), key=lambda path: path.stat().st_mtime_ns)
    with zipfile.ZipFile(archives[1]) as archive, archive.open("experiment.json") as file:
        assert json.load(file)["resume_strategy"] == "get"  # it adds to the experiment of the first one
    assert steps(tmp_path, first.version, "loss_step") == [*range(8), *range(4, 12)]  # two archives of one experiment
