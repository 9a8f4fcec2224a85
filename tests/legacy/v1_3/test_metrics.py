"""Metrics of ``pytorch_lightning.metrics``: the number of classes tells the task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics

from drivetrain.legacy.v1_3 import metrics

TODAY = {"F1": "F1Score", "FBeta": "FBetaScore"}


@pytest.mark.parametrize("name", ["ConfusionMatrix", "F1", "FBeta", "Precision", "Recall"])
@pytest.mark.parametrize(("classes", "task"), [(1, "binary"), (3, "multiclass")])
def test_the_number_of_classes_tells_the_task(name: str, classes: int, task: Any) -> None:
    pred, target = torch.tensor([0, 1, 1, classes - 1]), torch.tensor([0, 1, 0, classes - 1])
    pred, target = pred.clamp(max=max(classes - 1, 1)), target.clamp(max=max(classes - 1, 1))
    expected = getattr(torchmetrics, TODAY.get(name, name))(task=task, num_classes=classes)(pred, target)
    for metric in (
        getattr(metrics, name)(num_classes=classes),
        getattr(metrics, name)(classes, compute_on_step=False),
        getattr(metrics, name)(task, num_classes=classes),
    ):
        torch.testing.assert_close(metric(pred, target), expected)


def test_a_metric_without_a_number_of_classes_must_be_told_its_task() -> None:
    with pytest.raises(TypeError, match="task"):
        metrics.Recall()
