"""What is sent to Kubeflow Trainer, read by the models of its API: nothing in it is unknown."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from drivetrain.callbacks import trainjob
from drivetrain.cli import command
from drivetrain.loops.progress import Progress

models = pytest.importorskip("kubeflow_trainer_api.models")


@pytest.mark.parametrize("options", [[], ["--cpu"]], ids=["gpu", "cpu"])
def test_the_trainjob_of_a_recipe_is_of_its_schema(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    words = ["recipe", "trainjob", "train.py", "--nodes=2", "--devices=8", "--image=me/train:1", *options]
    assert command.main(words) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document


@pytest.mark.parametrize("max_epochs", [3, float("inf")])
def test_a_report_is_of_its_schema(max_epochs: float) -> None:
    limits = SimpleNamespace(max_epochs=max_epochs, max_steps=float("inf"), accumulate=1)
    trainer: Any = SimpleNamespace(
        progress=Progress(num_training_batches=10), logbook=SimpleNamespace(bar_metrics={"loss": 0.25}),
        limits=limits, callbacks=[],
    )  # fmt: skip
    status = trainjob._Reporter(trainer, 5.0, 5.0)._status()
    read = models.TrainerV1alpha1TrainerStatus.from_dict(json.loads(json.dumps(status)))
    assert read.progress_percentage == (0 if max_epochs == 3 else None)
    assert [(metric.name, metric.value) for metric in read.metrics] == [("loss", "0.25")]
    assert {*status} <= {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
