"""``pytorch_lightning.metrics``: the metrics of torchmetrics, which continued them."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torchmetrics import *  # noqa: F403
from torchmetrics import Metric

__all__ = sorted({*torchmetrics.__all__, "Accuracy", "MeanSquaredError"})


class Accuracy(Metric):  # type: ignore[no-redef]
    """The fraction of right predictions, as then: without being told the task.

    Args:
        threshold: for predictions of two classes, given as one probability for each sample.
        kwargs: of ``torchmetrics.Metric``.
    """

    correct: torch.Tensor
    total: torch.Tensor

    def __init__(self, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**{name: value for name, value in kwargs.items() if name != "compute_on_step"})
        self.threshold = threshold
        self.add_state("correct", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Count a batch: labels, or scores of shape (N, C, ...), or probabilities of two classes."""
        if preds.dim() == target.dim() + 1:
            preds = preds.argmax(dim=1)
        elif preds.is_floating_point():
            preds = (preds >= self.threshold).to(target.dtype)
        self.correct += (preds == target).sum()
        self.total += target.numel()

    def compute(self) -> torch.Tensor:
        """Return the fraction."""
        return self.correct.float() / self.total
