"""Functions of ``pytorch_lightning.metrics.functional``: the number of classes tells the task."""

from __future__ import annotations

import pytest
import torch
import torchmetrics.functional

from drivetrain.legacy.v1_1 import functional

PRED, TARGET = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])


@pytest.mark.parametrize("name", ["confusion_matrix", "f1", "fbeta", "precision", "recall"])
def test_the_number_of_classes_tells_the_task(name: str) -> None:
    today = getattr(torchmetrics.functional, {"f1": "f1_score", "fbeta": "fbeta_score"}.get(name, name))
    expected = today(PRED, TARGET, task="multiclass", num_classes=3)
    torch.testing.assert_close(getattr(functional, name)(PRED, TARGET, num_classes=3), expected)
    torch.testing.assert_close(getattr(functional, name)(PRED, TARGET, 3), expected)
