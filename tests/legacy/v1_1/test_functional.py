"""Functions of ``pytorch_lightning.metrics.functional``: the number of classes tells the task."""

from __future__ import annotations

import importlib
import pickle

import pytest
import torch
import torchmetrics.functional

from drivetrain import compat
from drivetrain.legacy.v1_1 import functional

PRED, TARGET = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])


@pytest.mark.parametrize("name", ["confusion_matrix", "f1", "fbeta", "precision", "recall"])
def test_the_number_of_classes_tells_the_task(name: str) -> None:
    today = getattr(torchmetrics.functional, {"f1": "f1_score", "fbeta": "fbeta_score"}.get(name, name))
    expected = today(PRED, TARGET, task="multiclass", num_classes=3)
    torch.testing.assert_close(getattr(functional, name)(PRED, TARGET, num_classes=3), expected)
    torch.testing.assert_close(getattr(functional, name)(PRED, TARGET, 3), expected)


SCORES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.2, 0.5], [0.1, 0.2, 0.7]])


@pytest.mark.parametrize("name", ["auroc", "average_precision", "roc", "precision_recall_curve"])
def test_the_shape_of_scores_tells_the_task(name: str) -> None:
    today, then = getattr(torchmetrics.functional, name), getattr(functional, name)
    torch.testing.assert_close(then(SCORES, TARGET), today(SCORES, TARGET, task="multiclass", num_classes=3))
    binary = SCORES[:, 1], (TARGET == 1).long()
    torch.testing.assert_close(then(*binary, pos_label=1), today(*binary, task="binary"))
    with pytest.raises((TypeError, ValueError), match="sample_weight"):
        then(*binary, sample_weight=[1.0] * 4)


@pytest.mark.parametrize("name", ["auroc", "multiclass_auroc", "roc"])
def test_a_function_of_scores_can_be_pickled(name: str) -> None:
    then = getattr(functional, name)
    assert pickle.loads(pickle.dumps(then)) is then


def test_counts_of_classes() -> None:
    assert [int(number) for number in functional.stat_scores(PRED, TARGET, 1)] == [1, 0, 2, 1, 2]
    assert [int(number) for number in functional.stat_scores(SCORES, TARGET, 2)] == [1, 1, 2, 0, 1]
    every = functional.stat_scores_multiple_classes(SCORES, TARGET)
    assert [row.tolist() for row in every] == [[1, 1, 1], [0, 0, 1], [3, 2, 2], [0, 1, 0], [1, 2, 1]]
    assert functional.iou(PRED, TARGET, reduction="none").tolist() == [1, 0.5, 0.5]
    assert float(functional.iou(PRED, TARGET)) == pytest.approx(2 / 3)
    assert [float(each) for each in functional.precision_recall(PRED, TARGET, num_classes=3)] == [0.75, 0.75]
    assert float(functional.multiclass_auroc(SCORES, TARGET)) == float(functional.auroc(SCORES, TARGET))
    assert float(functional.auc(torch.tensor([0.0, 1, 2]), torch.tensor([0.0, 1, 1]))) == 1.5


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("", "accuracy auc auroc average_precision bleu_score confusion_matrix explained_variance f1 fbeta "
             "image_gradients iou mean_absolute_error mean_squared_error mean_squared_log_error multiclass_auroc "
             "precision precision_recall precision_recall_curve psnr recall roc ssim stat_scores "
             "stat_scores_multiple_classes to_categorical to_onehot"),
        (".classification", "auc auroc get_num_classes iou stat_scores to_onehot"),
        (".f_beta", "f1 fbeta"), (".nlp", "bleu_score"), (".roc", "roc"), (".psnr", "psnr"), (".ssim", "ssim"),
        (".average_precision", "average_precision"), (".confusion_matrix", "confusion_matrix"),
        (".precision_recall_curve", "precision_recall_curve"), (".explained_variance", "explained_variance"),
        (".mean_squared_error", "mean_squared_error"), (".mean_absolute_error", "mean_absolute_error"),
        (".mean_squared_log_error", "mean_squared_log_error"),
    ],
)  # fmt: skip
def test_a_program_of_that_time_imports_them(module: str, names: str) -> None:
    compat.install(generation="1.1")
    try:
        found = importlib.import_module(f"pytorch_lightning.metrics.functional{module}")
        assert all(callable(getattr(found, name)) for name in names.split())
    finally:
        compat.uninstall()


def test_a_module_that_has_the_name_of_its_function_does_not_hide_it() -> None:
    compat.install(generation="1.1")
    try:
        module = importlib.import_module("pytorch_lightning.metrics.functional.roc")
        package = importlib.import_module("pytorch_lightning.metrics.functional")
        assert package.roc is module.roc
        assert importlib.import_module("pytorch_lightning.metrics.functional.nlp") is package.nlp  # no function's name
    finally:
        compat.uninstall()
