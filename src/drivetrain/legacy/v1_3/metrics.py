"""``pytorch_lightning.metrics``: the metrics of torchmetrics, the successor of this module."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torchmetrics import *  # noqa: F403
from torchmetrics import Metric

__all__ = sorted({*torchmetrics.__all__, "Accuracy", "F1", "FBeta", "MeanSquaredError"})


class Accuracy(Metric):  # type: ignore[no-redef]
    """The fraction of correct predictions, without an argument for the task, as in 1.3.

    Args:
        threshold: the smallest probability that counts as positive, for predictions of one probability per sample.
        kwargs: for ``torchmetrics.Metric``.
    """

    correct: torch.Tensor
    total: torch.Tensor

    def __init__(self, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**{name: value for name, value in kwargs.items() if name != "compute_on_step"})
        self.threshold = threshold
        self.add_state("correct", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch: labels, scores of shape (N, C, ...), or probabilities of two classes."""
        if preds.dim() == target.dim() + 1:
            preds = preds.argmax(dim=1)
        elif preds.is_floating_point():
            preds = (preds >= self.threshold).to(target.dtype)
        self.correct += (preds == target).sum()
        self.total += target.numel()

    def compute(self) -> torch.Tensor:
        """Return the fraction."""
        return self.correct.float() / self.total


def with_task(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a metric of torchmetrics, with ``task`` chosen by ``num_classes`` as in Lightning 1.3.

    One class means the task "binary"; several classes mean "multiclass". Without ``num_classes``, no task is added.
    """
    if args and isinstance(args[0], str):  # in torchmetrics, the first argument is the task
        args, kwargs = args[1:], {"task": args[0], **kwargs}
    given = {**dict(zip(("num_classes",), args, strict=False)), **kwargs}
    given = {name: value for name, value in given.items() if name != "compute_on_step"}
    classes = given.get("num_classes")
    if "task" not in given and isinstance(classes, int):
        given["task"] = "multiclass" if classes > 1 else "binary"
    return given


class _Classified:
    """A metric of torchmetrics that needs only the number of classes, not the task."""

    today: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.today(**with_task(args, kwargs))


class ConfusionMatrix(_Classified):  # type: ignore[no-redef]
    """For each true class, the number of samples per predicted class."""

    today = torchmetrics.ConfusionMatrix


class F1(_Classified):
    """The harmonic mean of precision and recall."""

    today = torchmetrics.F1Score


class FBeta(_Classified):
    """The weighted harmonic mean of precision and recall."""

    today = torchmetrics.FBetaScore


class Precision(_Classified):  # type: ignore[no-redef]
    """Of the samples predicted as a class, the fraction that belongs to this class."""

    today = torchmetrics.Precision


class Recall(_Classified):  # type: ignore[no-redef]
    """Of the samples in a class, the fraction that is predicted as this class."""

    today = torchmetrics.Recall
