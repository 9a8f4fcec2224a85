"""Functions of ``pytorch_lightning.metrics.functional``; unlike the functions of torchmetrics, these functions need no
``task``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import functional
from torchmetrics.utilities.compute import auc
from torchmetrics.utilities.data import select_topk, to_categorical, to_onehot

from drivetrain.legacy.v1_3.metrics import Accuracy, with_task

__all__ = [
    "accuracy", "auc", "auroc", "average_precision", "confusion_matrix", "f1", "fbeta", "get_num_classes", "iou",
    "multiclass_auroc", "precision", "precision_recall", "precision_recall_curve", "recall", "roc", "select_topk",
    "stat_scores", "stat_scores_multiple_classes", "to_categorical", "to_onehot",
]  # fmt: skip


def accuracy(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the fraction of correct predictions, from labels or from scores of shape (N, C, ...)."""
    metric: Any = Accuracy().to(pred.device)  # type: ignore[call-arg]
    metric.update(pred, target)
    return metric.compute()


def _classified(today: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function of torchmetrics; the wrapper chooses ``task`` by the number of classes."""

    def call(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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


def _scored(today: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torchmetrics that takes scores. The default number of classes comes from the shape of the
    scores.
    """
    classified = _classified(today)

    def call(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and "task" not in kwargs and kwargs.get("num_classes") is None:
            kwargs["num_classes"] = pred.shape[1] if pred.dim() > target.dim() else 1
        if kwargs.get("pos_label") in (None, 1):
            kwargs.pop("pos_label", None)
        return classified(pred, target, *args, **kwargs)

    return call


auroc = multiclass_auroc = _scored(functional.auroc)
average_precision = _scored(functional.average_precision)
precision_recall_curve = _scored(functional.precision_recall_curve)
roc = _scored(functional.roc)


def precision_recall(pred: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return precision and recall."""
    return precision(pred, target, *args, **kwargs), recall(pred, target, *args, **kwargs)


def get_num_classes(pred: torch.Tensor, target: torch.Tensor, num_classes: int | None = None) -> int:
    """Return ``num_classes``; for ``None``, return the largest label plus one."""
    return int(max(pred.max(), target.max())) + 1 if num_classes is None else num_classes


def iou(
    pred: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int | None = None,
    absent_score: float = 0.0,
    num_classes: int | None = None,
    reduction: str = "elementwise_mean",
) -> torch.Tensor:
    """Return the intersection over union, averaged over the classes; with ``reduction="none"``, one value per class."""
    # Some versions of torchmetrics lack this argument, which is therefore passed only if needed.
    absent: Any = {"zero_division": absent_score} if absent_score else {}
    return functional.jaccard_index(
        pred, target, "multiclass", num_classes=get_num_classes(pred, target, num_classes), ignore_index=ignore_index,
        average={"elementwise_mean": "macro", "none": "none"}[reduction], **absent,  # type: ignore[arg-type]
    )  # fmt: skip


def stat_scores(pred: torch.Tensor, target: torch.Tensor, class_index: int, argmax_dim: int = 1) -> tuple[Any, ...]:
    """Return five numbers for the class ``class_index``: true positives, false positives, true negatives, false
    negatives and samples.
    """
    if pred.dim() == target.dim() + 1:
        pred = pred.argmax(argmax_dim)
    said, true = pred == class_index, target == class_index
    return (said & true).sum(), (said & ~true).sum(), (~said & ~true).sum(), (~said & true).sum(), true.sum()


def stat_scores_multiple_classes(
    pred: torch.Tensor, target: torch.Tensor, num_classes: int | None = None, argmax_dim: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return the five numbers of :func:`stat_scores`, each as a float tensor with one element per class."""
    if pred.dim() == target.dim() + 1:
        pred = pred.argmax(argmax_dim)
    each = [stat_scores(pred, target, index) for index in range(get_num_classes(pred, target, num_classes))]
    return tuple(torch.stack(numbers).float() for numbers in zip(*each, strict=True))
