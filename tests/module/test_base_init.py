"""Classes of the user's whose __init__ forgets that of the class below: the error names them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from drivetrain import Callback, LightningDataModule, LightningModule, Trainer
from drivetrain.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger

T = TypeVar("T")


class Whole(LightningModule):
    def __init__(self, width: int = 2) -> None:
        self.before = width  # a plain value may come before the base class
        super().__init__()
        self.layer = nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, batch: Any) -> Any:
        return self.layer(batch) * self.scale


class Forgets(LightningModule):
    def __init__(self, kind: str) -> None:
        if kind == "layer":
            self.part = nn.Linear(2, 1)
        elif kind == "parameter":
            self.part = nn.Parameter(torch.ones(1))  # type: ignore[assignment]
        elif kind == "register_buffer":
            self.register_buffer("part", torch.ones(1))
        elif kind == "register_parameter":
            self.register_parameter("part", nn.Parameter(torch.ones(1)))
        else:
            self.add_module("part", nn.Linear(2, 1))


@pytest.mark.parametrize("kind", ["layer", "parameter", "register_buffer", "register_parameter", "add_module"])
def test_what_is_registered_before_the_base_class_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Forgets.__init__ assigns self.part, an? .*Begin it with super\(\)"):
        Forgets(kind)


def test_a_module_is_as_torchs_are() -> None:
    made = Whole(3)
    assert list(inspect.signature(Whole).parameters) == ["width"]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert other.before == 3
        assert list(other.state_dict()) == ["scale", "layer.weight", "layer.bias"]
        assert torch.equal(other.layer.weight, made.layer.weight)
        other.added = nn.Linear(1, 1)  # it registers as ever
        assert "added.weight" in other.state_dict()
    assert all(type(vars(made)[name]) is dict for name in ("_parameters", "_buffers", "_modules"))
    batch = torch.ones(1, 3)
    assert torch.equal(torch.compile(made, backend="eager")(batch), made(batch))


def test_other_classes_may_make_the_module() -> None:
    class Given(nn.Module):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__new__(cls)
            made.__dict__["given"] = (args, kwargs)
            return made

    class Both(LightningModule, Given, Generic[T]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

    assert Both(1, a=2).given == ((1,), {"a": 2})


def test_a_data_module_without_its_base_class_has_no_trainer() -> None:
    class Data(LightningDataModule):
        def __init__(self) -> None: ...

    assert Data().trainer is None


class Stops(EarlyStopping):
    def __init__(self) -> None:
        self.mine = 1


class StopsBelow(Stops): ...


class StopsAbove(EarlyStopping):
    def __init__(self) -> None:
        super().__init__("loss")


class Skips(StopsAbove):
    def __init__(self) -> None:
        self.mine = 1


class Writes(CSVLogger):
    def __init__(self) -> None:
        self.mine = 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"callbacks": [Stops()]}, "Stops.__init__ has not called the __init__ of its base class, EarlyStopping."),
        ({"callbacks": StopsBelow()}, "Stops.__init__ has not called the __init__ of its base class, EarlyStopping."),
        ({"callbacks": [Skips()]}, "Skips.__init__ has not called the __init__ of its base class, EarlyStopping."),
        ({"logger": Writes()}, "Writes.__init__ has not called the __init__ of its base class, CSVLogger."),
    ],
)
def test_a_callback_or_logger_without_its_base_class_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Trainer(accelerator="cpu", **arguments)
    assert words in str(raised.value)
    assert "Begin it with super().__init__()" in str(raised.value)


class Copied(EarlyStopping):
    def __init__(self, other: EarlyStopping) -> None:
        vars(self).update(vars(other))


class Named(EarlyStopping):
    def __init__(self) -> None:
        EarlyStopping.__init__(self, "loss")


@dataclasses.dataclass
class Data(EarlyStopping):
    patience: int = 3

    def __post_init__(self) -> None:
        super().__init__("loss", patience=self.patience)


class Plain(Callback):
    def __init__(self) -> None:
        self.mine = 1


def test_what_has_its_attributes_is_taken() -> None:
    made = [Copied(EarlyStopping("a")), Named(), Data(), Plain(), LambdaCallback(), ModelCheckpoint()]
    for callback in made:
        Trainer(accelerator="cpu", logger=False, callbacks=[callback])
