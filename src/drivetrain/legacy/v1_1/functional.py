"""Functions of ``pytorch_lightning.metrics.functional`` that need not be told the task."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.legacy.v1_3.metrics import Accuracy


def accuracy(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the fraction of right predictions: labels, or scores of shape (N, C, ...)."""
    metric: Any = Accuracy().to(pred.device)  # type: ignore[call-arg]
    metric.update(pred, target)
    fraction: torch.Tensor = metric.compute()
    return fraction
