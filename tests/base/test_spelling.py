"""Which names are misspelt ones, and which are names of something else."""

from __future__ import annotations

import pytest

from drivetrain.base.spelling import misspelt


@pytest.mark.parametrize("name", ["val_los", "val_losss", "val-loss", "Val_Loss", "val/loss", "valid_loss", "vla_loss"])
def test_a_letter_or_two_is_a_mistake(name: str) -> None:
    assert misspelt(name, ["val_acc", "val_loss"]) == "val_loss"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("val_loss", ["val_loss", "val_los"]),
        ("train_loss", ["val_loss"]),
        ("loss", ["val_loss"]),
        ("t_loss", ["v_loss"]),
        ("val_top1", ["val_top5"]),
        ("train_mean_average_precision", ["val_mean_average_precision"]),
        ("f1", ["fx"]),
        ("val_loss", []),
    ],
)
def test_the_name_of_something_else_is_none(name: str, known: list[str]) -> None:
    assert misspelt(name, known) is None
