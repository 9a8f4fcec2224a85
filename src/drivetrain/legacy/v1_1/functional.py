"""Functions of ``pytorch_lightning.metrics.functional`` that need not be told the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import functional

from drivetrain.legacy.v1_3.metrics import Accuracy, with_task


def accuracy(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the fraction of right predictions: labels, or scores of shape (N, C, ...)."""
    metric: Any = Accuracy().to(pred.device)  # type: ignore[call-arg]
    metric.update(pred, target)
    fraction: torch.Tensor = metric.compute()
    return fraction


def _classified(today: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``today``'s function, told its task by the number of classes."""

    def call(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str):  # today's call: the task comes first
            args, kwargs = args[1:], {"task": args[0], **kwargs}
        return today(pred, target, **with_task(args, kwargs))

    return call


confusion_matrix = _classified(functional.confusion_matrix)
f1 = _classified(functional.f1_score)
precision = _classified(functional.precision)
recall = _classified(functional.recall)


def fbeta(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the weighted harmonic mean of precision and recall."""
    given = {**dict(zip(("num_classes", "beta"), args, strict=False)), **kwargs}
    return _classified(functional.fbeta_score)(pred, target, **given)
