"""MLFlowLogger with the real MLflow, whose store is a folder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.extras.logged import Net, cut_and_resumed, loader, trainer

from drivetrain.callbacks import ModelCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import MLFlowLogger


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return lambda **arguments: MLFlowLogger(save_dir=tmp_path / "runs", **arguments)


def steps(logger: MLFlowLogger, name: str) -> list[int]:
    return [metric.step for metric in logger.experiment.get_metric_history(logger.run_id, name)]


def test_a_fit_logs_values_and_hyperparameters(make: Any, tmp_path: Path) -> None:
    logger = make(experiment_name="mine", run_name="first", tags={"team": 3}, prefix="a")
    run = trainer(tmp_path, logger)
    run.fit(Net(rates={"lr": 0.1}), loader())
    found = logger.experiment.get_run(logger.run_id)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "first"
    assert found.data.tags["team"] == "3"
    assert found.data.params == {"width": "2", "rates/lr": "0.1"}
    assert steps(logger, "a-loss_step") == [0, 1, 2, 3]
    assert steps(logger, "a-loss_epoch") == [3]
    assert run.checkpoint_callback is not None
    assert f"{logger.run_id}/checkpoints" in str(run.checkpoint_callback.best_model_path)
    run.test(WithTest(rates={"lr": 0.1}), loader(), verbose=False)  # its hyperparameters are logged too
    assert "a-test" in logger.experiment.get_run(logger.run_id).data.metrics


class WithTest(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", 1.0)


def test_a_resumed_fit_continues_the_run_and_no_step_goes_back(make: Any, tmp_path: Path) -> None:
    first, second = cut_and_resumed(tmp_path, make)
    assert first.run_id == second.run_id == second.version
    assert steps(second, "loss_step") == list(range(12))
    assert steps(second, "loss_epoch") == [3, 7, 11]
    assert steps(second, "epoch") == sorted(steps(second, "epoch"))
    assert len(first.experiment.search_runs([first.experiment_id])) == 1


def test_another_run_begins_without_a_checkpoint(make: Any, tmp_path: Path) -> None:
    """Negative control of the test above."""
    ids = set()
    for _ in range(2):
        logger = make()
        trainer(tmp_path, logger).fit(Net(), loader())
        ids.add(logger.run_id)
    assert len(ids) == 2


def test_a_run_that_is_given_is_continued(make: Any, tmp_path: Path) -> None:
    first = make()
    trainer(tmp_path, first).fit(Net(), loader())
    second = pickle.loads(pickle.dumps(make(run_id=first.run_id)))
    second.log_hyperparams()
    second.log_hyperparams({"width": 2})  # MLflow lets no parameter be changed, and this one is not
    second.log_metrics({"more !": 1.0, "text": 2}, step=9)
    assert second.experiment.get_run(first.run_id).info.status == "RUNNING"
    assert second.experiment.get_run(first.run_id).data.metrics["more "] == 1.0


def test_media_and_checkpoints_are_artifacts(make: Any, tmp_path: Path) -> None:
    logger = make(log_model="all")
    logger.log_image("picture", [torch.zeros(4, 4, 3, dtype=torch.uint8)], step=1)
    logger.log_text("words", columns=["a"], data=[["b"]], step=2)
    folder = Path(logger.experiment.get_run(logger.run_id).info.artifact_uri.removeprefix("file:"))
    assert json.loads((folder / "words-step2.json").read_text()) == {"columns": ["a"], "data": [["b"]]}
    assert list((folder / "images").iterdir())
    trainer(tmp_path, logger, callbacks=[ModelCheckpoint(tmp_path / "saved", filename="one")]).fit(Net(), loader())
    assert (folder / "model/checkpoints/one/one.ckpt").exists()
    with pytest.raises(ConfigurationError, match="log_image\\('picture'\\) got a Tensor. Pass a list"):
        logger.log_image("picture", torch.zeros(4, 4, 3))


def test_a_failed_fit_is_marked(make: Any, tmp_path: Path) -> None:
    class Fails(Net):
        def on_train_end(self) -> None:
            raise RuntimeError("on purpose")

    logger = make()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, logger).fit(Fails(), loader())
    assert logger.experiment.get_run(logger.run_id).info.status == "FAILED"


def test_a_server_that_is_not_there_is_an_error_before_training(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = MLFlowLogger(tracking_uri="http://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match="MLFlowLogger cannot begin a run"):
        trainer(tmp_path, logger).fit(Net(), loader())
