"""The field's precisions of one strategy are those of any strategy here."""

from __future__ import annotations

import pytest
import torch

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError
from drivetrain.plugins import DeepSpeedPrecision, FSDPPrecision
from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision


@pytest.mark.parametrize("cls", [FSDPPrecision, DeepSpeedPrecision])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("32-true", Precision), ("bf16-mixed", MixedPrecision), ("16-true", HalfPrecision), ("64-true", DoublePrecision)],
)
def test_the_precision_of_a_name_is_made(cls: type, name: str, kind: type) -> None:
    made = cls(name)
    assert type(made) is kind
    assert Trainer(accelerator="cpu", plugins=[made], logger=False).precision == name


def test_a_scaler_is_that_of_16_mixed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert FSDPPrecision("16-mixed", scaler).scaler is scaler
    with pytest.raises(ConfigurationError, match="only 16-mixed scales losses"):
        FSDPPrecision("bf16-mixed", scaler)
