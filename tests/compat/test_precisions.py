"""The field's precisions of one strategy are those of any strategy here."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.compat.boring_classes import BoringModel
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


class Doubles(FSDPPrecision):
    def convert_input(self, data: Any) -> Any:
        return super().convert_input(data) * 2


class Named(DeepSpeedPrecision):
    def __init__(self, mine: int, name: str = "bf16-mixed") -> None:
        super().__init__(name)
        self.mine = mine


@pytest.mark.parametrize(("name", "kind"), [("bf16-mixed", MixedPrecision), ("64-true", DoublePrecision)])
def test_overrides_of_a_subclass_are_called_before_those_of_the_precision(name: str, kind: type) -> None:
    made = Doubles(name)
    assert isinstance(made, Doubles)
    assert isinstance(made, kind)
    assert made.precision == name
    assert made.convert_input(torch.ones(1, dtype=torch.float32)) == 2.0
    assert made.convert_input(torch.ones(1)).dtype is (torch.float64 if kind is DoublePrecision else torch.float32)


def test_a_subclass_may_have_arguments_of_its_own_and_be_copied() -> None:
    made = Named(3)
    for each in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (each.mine, each.precision) == (3, "bf16-mixed")
        assert isinstance(each, MixedPrecision)
    assert type(copy.deepcopy(made)) is type(made)
    assert Named(1, "32-true").precision == "32-true"


def test_a_trainer_calls_the_overrides_of_a_subclass(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sees(FSDPPrecision):
        def convert_input(self, data: Any) -> Any:
            seen.append(data)
            return super().convert_input(data)

    trainer = Trainer(
        accelerator="cpu", plugins=[Sees("bf16-mixed")], default_root_dir=tmp_path, max_steps=1, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(BoringModel())
    assert trainer.precision == "bf16-mixed"
    assert seen
