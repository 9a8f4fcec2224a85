"""Moving a module where that makes new parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.strategies.placement import place


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_parameter("nothing", None)


@pytest.fixture
def new_parameters() -> Iterator[None]:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.usefixtures("new_parameters")
def test_tied_weights_stay_tied() -> None:
    module, control = Tied(), Tied()
    control.to("meta")
    assert control.second.weight is not control.first.weight  # torch alone lets go of them
    before = module.first.weight
    assert place(module, torch.device("meta")) is module
    assert module.first.weight is module.second.weight is not before
    assert module.other.weight is not module.first.weight
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}


def test_objects_that_stay_are_left_alone() -> None:
    module = Tied()
    before = list(module.parameters())
    place(module, torch.device("cpu"))
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


class InPlace(nn.Linear):
    def to(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().to(*args, **kwargs)


def test_an_override_of_to_may_return_nothing() -> None:
    module = InPlace(2, 2)
    assert place(module, torch.device("meta")) is module
    assert module.weight.device.type == "meta"
