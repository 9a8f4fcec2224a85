"""Objects built from hyperparameters that LightningCLI has saved."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from drivetrain import LightningModule
from drivetrain.compat.instantiating import instantiate_module
from drivetrain.errors import ConfigurationError


class Net(LightningModule):
    def __init__(self, layer: nn.Module, width: int = 3, **more: Any) -> None:
        super().__init__()
        self.layer, self.width, self.more = layer, width, more


class Wide(Net):
    pass


@dataclasses.dataclass
class Rate:
    value: float = 0.1


class Rated(LightningModule):
    def __init__(self, rate: Rate) -> None:
        super().__init__()
        self.rate = rate


LAYER = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 4}}


def test_objects_among_the_arguments_are_built() -> None:
    net = instantiate_module(Net, {"layer": LAYER, "width": 5, "other": "x", "_instantiator": "of the file"})
    assert type(net) is Net
    assert isinstance(net.layer, nn.Linear)
    assert (net.layer.out_features, net.width, net.more) == (4, 5, {"other": "x"})


def test_a_subclass_is_named_by_its_path() -> None:
    net = instantiate_module(Net, {"_class_path": f"{__name__}.Wide", "layer": LAYER})
    assert type(net) is Wide
    assert net.width == 3
    with pytest.raises(ConfigurationError, match="no subclass of Net"):
        instantiate_module(Net, {"_class_path": "torch.nn.Linear"})


@pytest.mark.parametrize("values", [{"rate.value": 3}, {"rate": {"value": 3}}])
def test_fields_of_a_dataclass_are_arguments(values: dict[str, Any]) -> None:
    assert instantiate_module(Rated, values).rate == Rate(3.0)
