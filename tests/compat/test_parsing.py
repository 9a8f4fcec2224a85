from __future__ import annotations

import importlib.machinery
import inspect
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from drivetrain import Callback, LightningDataModule, LightningModule
from drivetrain.compat.parsing import (
    clean_namespace,
    collect_init_args,
    get_init_args,
    get_torchvision_model,
    is_overridden,
    is_param_in_hook_signature,
    is_picklable,
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
    parse_class_init_keys,
    save_hyperparameters,
)


class Model(LightningModule):
    def __init__(self, lr: float = 0.1, **more: Any) -> None:
        super().__init__()
        self.seen = get_init_args(inspect.currentframe())  # type: ignore[arg-type]
        save_hyperparameters(self, "lr")

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


def test_what_a_class_overrides() -> None:
    assert is_overridden("training_step", Model())
    assert not is_overridden("on_fit_start", Model())
    assert not is_overridden("training_step", None)
    assert not is_overridden("no_such_hook", Model())
    assert is_overridden("training_step", Model(), parent=LightningModule)
    assert is_overridden("seen", SimpleNamespace(seen=3), parent=Model) is False
    for plain in (LightningDataModule(), Callback()):
        assert not is_overridden("setup", plain)
    with pytest.raises(ValueError, match="parent="):
        is_overridden("setup", object())


def test_which_arguments_a_hook_takes() -> None:
    class Hooks:
        def named(self, batch: Any, dataloader_iter: Any) -> None: ...

        def rest(self, *args: Any) -> None: ...

    hooks = Hooks()
    assert is_param_in_hook_signature(hooks.named, "dataloader_iter")
    assert not is_param_in_hook_signature(hooks.named, "self")
    assert is_param_in_hook_signature(hooks.rest, "batch")
    assert not is_param_in_hook_signature(hooks.rest, "batch", explicit=True)
    assert is_param_in_hook_signature(hooks.named, "other", min_args=2)
    assert not is_param_in_hook_signature(Hooks.named, "other", min_args=3)


def test_the_arguments_of_a_constructor() -> None:
    assert Model(0.5, depth=3).seen == {"lr": 0.5, "depth": 3}
    assert Model(0.5).hparams == {"lr": 0.5}
    assert get_init_args(inspect.currentframe()) == {}  # type: ignore[arg-type]  # this is no method


def test_the_arguments_of_every_constructor_of_an_object() -> None:
    class Base:
        def __init__(self, a: int = 1) -> None:
            super().__init__()
            self.collected = collect_init_args(inspect.currentframe(), [], classes=(Base,))  # type: ignore[arg-type]

    class Child(Base):
        def __init__(self, b: int, **more: Any) -> None:
            super().__init__(a=b + 1)

    class Owner:
        def __init__(self, c: int) -> None:
            super().__init__()
            self.child = Child(c, d=5)

    assert Owner(3).child.collected == [{"a": 4}, {"b": 3, "d": 5}]
    assert Base().collected == [{"a": 1}]


def test_a_model_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()
    torchvision = ModuleType("torchvision")
    torchvision.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    torchvision.models = SimpleNamespace(get_model=lambda name, **kwargs: (made, name, kwargs))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    assert get_torchvision_model("resnet18", num_classes=3) == (made, "resnet18", {"num_classes": 3})  # type: ignore[comparison-overlap]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchvision"):
        get_torchvision_model("resnet18")


def test_how_a_constructor_calls_its_parameters() -> None:
    class Odd:
        def __init__(this, a: int, *rest: Any, **more: Any) -> None: ...

    assert parse_class_init_keys(Odd) == ("this", "rest", "more")
    assert parse_class_init_keys(Model) == ("self", None, "more")


def test_what_pickle_takes() -> None:
    assert is_picklable([1])
    assert not is_picklable(lambda: 1)
    values = {"a": 1, "b": lambda: 1}
    with pytest.warns(UserWarning, match="'b' was removed: a function"):
        clean_namespace(values)
    assert values == {"a": 1}


def test_an_attribute_is_looked_for_in_three_places() -> None:
    model = Model(0.5)
    assert lightning_getattr(model, "lr") == 0.5
    lightning_setattr(model, "lr", 0.7)
    assert model.hparams.lr == 0.7
    assert lightning_hasattr(model, "training")
    assert not lightning_hasattr(model, "batch_size")
    datamodule = SimpleNamespace(batch_size=8, hparams=Namespace(lr=0.9))
    model.__dict__["_trainer"] = SimpleNamespace(datamodule=datamodule)
    assert lightning_getattr(model, "batch_size") == 8
    lightning_setattr(model, "batch_size", 16)
    lightning_setattr(model, "lr", 0.2)
    assert (datamodule.batch_size, datamodule.hparams.lr, model.hparams.lr) == (16, 0.2, 0.2)
    with pytest.raises(AttributeError, match="'nothing'"):
        lightning_getattr(model, "nothing")
    with pytest.raises(AttributeError, match="'nothing'"):
        lightning_setattr(model, "nothing", 1)
