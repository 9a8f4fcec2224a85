"""The field's precisions of one strategy are those of any strategy here."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("cls", [FSDPPrecision, DeepSpeedPrecision])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.float32), ("16-mixed", torch.float32),
     ("bf16-true", torch.bfloat16), ("16-true", torch.float16)],
)  # fmt: skip
def test_layers_and_tensors_may_be_made_in_their_contexts(cls: Any, name: str, dtype: torch.dtype) -> None:
    made = cls(name)
    with made.module_init_context():
        assert torch.nn.Linear(1, 1).weight.dtype is dtype
    with made.tensor_init_context():
        assert torch.ones(1).dtype is dtype


@pytest.mark.parametrize("cls", [FSDPPrecision, DeepSpeedPrecision])
@pytest.mark.parametrize("name", ["bf16-mixd", "xla", "bf16_mixed"])
def test_an_unknown_name_is_a_value_error_with_the_known_ones(cls: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no precision called '{name}'.*bf16-mixed") as caught:
        cls(name)
    assert isinstance(caught.value, ValueError)


def test_a_scaler_is_that_of_16_mixed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert FSDPPrecision("16-mixed", scaler).scaler is scaler
    with pytest.raises(ConfigurationError, match="only 16-mixed scales losses"):
        FSDPPrecision("bf16-mixed", scaler)
