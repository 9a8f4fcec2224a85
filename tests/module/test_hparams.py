"""save_hyperparameters: what it collects, from where, and that it is kept."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import inspect
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import LightningDataModule, LightningModule
from drivetrain.errors import ConfigurationError
from drivetrain.module.hparams import AttributeDict

# ---- AttributeDict ---------------------------------------------------------------------------------------------------


def test_keys_are_attributes() -> None:
    params = AttributeDict(lr=0.1)
    params.hidden = 8
    assert (params.lr, params["hidden"], "hidden" in dir(params)) == (0.1, 8, True)
    del params.lr
    assert params == {"hidden": 8}


def test_a_missing_key_is_an_attribute_error_that_suggests_one() -> None:
    params = AttributeDict(learning_rate=0.1)
    with pytest.raises(AttributeError, match="no hyperparameter 'learning_rat'. Did you mean 'learning_rate'"):
        _ = params.learning_rat
    with pytest.raises(AttributeError, match="no hyperparameter 'lr'. Known: learning_rate."):
        del params.lr
    with pytest.raises(AttributeError, match="Known: none."):
        _ = AttributeDict({1: 2}).one  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))],
    ids=["copy", "deep", "pickle"],
)
def test_copies_keep_the_class(copied: Callable[[AttributeDict], AttributeDict]) -> None:
    params = AttributeDict(lr=0.1, inner=AttributeDict(layers=[1, 2]))
    again = copied(params)
    assert type(again) is AttributeDict
    assert again == params
    assert again.inner.layers == [1, 2]


def test_a_deep_copy_is_deep_and_keeps_what_is_shared() -> None:
    layers = [1, 2]
    again = copy.deepcopy(AttributeDict(a=layers, b=layers))
    assert again.a is again.b
    assert again.a is not layers


def test_what_cannot_be_copied_is_shared_and_never_half_copied() -> None:
    mixed = [1, threading.Lock()]
    params = AttributeDict(a=mixed, b=mixed, c=[3])
    again = copy.deepcopy(params)
    assert again.a is mixed
    assert again.b is mixed  # and not the half of it that the first attempt made
    assert again.c is not params.c


# ---- what is collected -----------------------------------------------------------------------------------------------


class Plain(LightningModule):
    def __init__(self, lr: float, *layers: int, hidden: int = 8, **extra: Any) -> None:
        super().__init__()
        local = lr  # is no argument
        self.save_hyperparameters()
        self.layer = nn.Linear(2, hidden)
        del local


def test_arguments_are_collected_and_keywords_are_flat() -> None:
    model = Plain(0.1, 4, 5, dropout=0.5)
    assert model.hparams == {"lr": 0.1, "hidden": 8, "dropout": 0.5}
    assert type(model.hparams) is AttributeDict
    assert model.hparams.dropout == 0.5
    assert model._hparams_name == "kwargs"


def test_without_a_call_there_are_none() -> None:
    model = LightningModule()
    assert model.hparams == {}
    assert model.hparams is model.hparams
    assert model.hparams_initial == {}
    assert (model._log_hyperparams, model._hparams_name) == (False, None)


class Before(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        self.save_hyperparameters()
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_it_works_before_the_module_is_initialised() -> None:
    model = Before(0.3)
    assert model.hparams == {"lr": 0.3}
    assert len(list(model.parameters())) == 2


def test_a_datamodule_has_them_too() -> None:
    class Data(LightningDataModule):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    assert Data(8).hparams == {"batch_size": 8}
    assert Data()._log_hyperparams is False


class Base(LightningModule):
    def __init__(self, hidden: int, lr: float = 0.1, **rest: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Middle(Base):
    def __init__(self, name: str, **rest: Any) -> None:
        super().__init__(hidden=16, **rest)


class Leaf(Middle):
    def __init__(self, lr: float, depth: int = 2) -> None:
        super().__init__("leaf", lr=lr / 10, seed=3)


def test_a_base_class_sees_the_arguments_of_all_classes_and_the_derived_win() -> None:
    assert Leaf(1.0).hparams == {"hidden": 16, "lr": 1.0, "seed": 3, "name": "leaf", "depth": 2}


def test_another_object_under_construction_gives_nothing() -> None:
    class Outer(LightningModule):
        def __init__(self, outer: int) -> None:
            super().__init__()
            self.inner = Base(hidden=outer)
            self.save_hyperparameters()

    model = Outer(3)
    assert model.inner.hparams == {"hidden": 3, "lr": 0.1}
    assert model.hparams == {"outer": 3}


def test_helpers_decorators_closures_and_another_name_for_self_do_not_hide_the_arguments() -> None:
    def decorated(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            init(*args, **kwargs)

        return wrapper

    class Wrapped(LightningModule):
        @decorated
        def __init__(this, lr: float, hidden: int = 1) -> None:
            super().__init__()
            this.read = lambda: (this.training, lr)  # both are cells now
            this.keep()

        def keep(this) -> None:
            this.save_hyperparameters()

        def save_hyperparameters(this, *args: Any, **kwargs: Any) -> None:
            super().save_hyperparameters(*args, **kwargs)

    assert Wrapped(0.1).hparams == {"lr": 0.1, "hidden": 1}


def test_the_value_is_the_one_at_the_time_of_the_call() -> None:
    class Model(LightningModule):
        def __init__(self, lr: float | None = None, gone: int = 1) -> None:
            super().__init__()
            lr = lr or 0.5
            del gone
            self.save_hyperparameters()

    assert Model().hparams == {"lr": 0.5}


@pytest.mark.parametrize(
    ("args", "ignore", "expected"),
    [
        ((), "lr", {"hidden": 8, "seed": 1}),
        ((), ["lr", "hidden", "what is not there"], {"seed": 1}),
        (("lr", "seed"), None, {"lr": 0.1, "seed": 1}),
        (("lr", "hidden"), ("lr",), {"hidden": 8}),
        (({"a": 1, "b": 2},), "a", {"b": 2}),
    ],
)
def test_names_and_ignore(args: tuple[Any, ...], ignore: Any, expected: dict[str, Any]) -> None:
    class Model(LightningModule):
        def __init__(self, lr: float = 0.1, hidden: int = 8, **rest: Any) -> None:
            super().__init__()
            self.save_hyperparameters(*args, ignore=ignore)

    assert Model(seed=1).hparams == expected


def test_calls_add_up() -> None:
    class Model(LightningModule):
        def __init__(self, lr: float, hidden: int) -> None:
            super().__init__()
            self.save_hyperparameters("lr", logger=False)
            self.hparams.lr = 7.0
            self.save_hyperparameters("hidden")

    model = Model(0.1, 2)
    assert model.hparams == {"lr": 7.0, "hidden": 2}
    assert model.hparams_initial == {"lr": 0.1, "hidden": 2}
    assert model._log_hyperparams is True


def test_frame_and_given_hparams_say_where_to_look() -> None:
    class Model(LightningModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            here = inspect.currentframe()
            threading.Thread(target=lambda: self.save_hyperparameters(frame=here)).run()

        def again(self) -> None:
            self.save_hyperparameters("depth", given_hparams={"depth": 3, "other": 4})

    model = Model(0.1)
    assert model.hparams == {"lr": 0.1}
    model.again()
    assert model.hparams == {"lr": 0.1, "depth": 3}


# ---- one object ------------------------------------------------------------------------------------------------------


@dataclass
class Config:
    lr: float = 0.1
    layers: list[int] = field(default_factory=lambda: [1])


@pytest.mark.parametrize(
    "conf",
    [
        {"lr": 0.1, "layers": [1]},
        argparse.Namespace(lr=0.1, layers=[1]),
        types.SimpleNamespace(lr=0.1, layers=[1]),
        AttributeDict(lr=0.1, layers=[1]),
        Config(),
    ],
    ids=lambda conf: type(conf).__name__,
)
def test_one_object_becomes_the_hyperparameters(conf: Any) -> None:
    class Model(LightningModule):
        def __init__(self, first: int, conf: Any) -> None:
            super().__init__()
            self.save_hyperparameters(conf)

    model = Model(1, conf)
    assert model.hparams == {"lr": 0.1, "layers": [1]}
    assert model.hparams.lr == 0.1
    assert model._hparams_name == "conf"


def test_the_object_has_the_name_under_which_the_derived_class_got_it() -> None:
    class General(LightningModule):
        def __init__(self, settings: dict[str, Any]) -> None:
            super().__init__()
            self.save_hyperparameters(settings)

    class Special(General):
        def __init__(self, conf: dict[str, Any]) -> None:
            super().__init__(conf)

    assert Special({"lr": 1})._hparams_name == "conf"


def test_an_object_that_is_no_argument_counts_as_keywords_and_may_come_at_any_time() -> None:
    model = Plain(0.1)
    model.save_hyperparameters({"note": "x"})
    assert model.hparams == {"lr": 0.1, "hidden": 8, "note": "x"}
    assert model._hparams_name == "kwargs"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hiden",), "Model.__init__ has no argument 'hiden' to save as a hyperparameter. Did you mean 'hidden'?"),
        ((5,), 'got int. Pass names of arguments, as in save_hyperparameters("lr", "hidden")'),
        ((["lr"],), "got list. Pass names of arguments"),
        (({"a": 1}, {"b": 1}), "got dict, dict. Pass names of arguments"),
        ((Config,), "got type. Pass names of arguments"),
    ],
)
def test_what_cannot_be_saved_is_an_error(args: tuple[Any, ...], message: str) -> None:
    class Model(LightningModule):
        def __init__(self, lr: float = 0.1, hidden: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters(*args)

    with pytest.raises(ConfigurationError) as caught:
        Model()
    assert message in str(caught.value)


@pytest.mark.parametrize("args", [(), ("lr",)])
def test_outside_of_init_there_is_nothing_to_collect(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"outside of __init__.*pass a dictionary"):
        LightningModule().save_hyperparameters(*args)


# ---- dataclasses -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)  # a module is hashed by identity
class DataclassModule(LightningModule):
    hidden: int
    lr: float = 0.1
    layers: list[int] = field(default_factory=lambda: [1, 2])
    scale: InitVar[float] = 2.0

    def __post_init__(self, scale: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(self.hidden, 2)


def test_a_dataclass_module() -> None:
    model = DataclassModule(3)
    assert model.hparams == {"hidden": 3, "lr": 0.1, "layers": [1, 2], "scale": 2.0}
    assert DataclassModule(3, layers=[5]).hparams.layers == [5]


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_changes_do_not_reach_the_initial_ones() -> None:
    layers = [1]

    class Model(LightningModule):
        def __init__(self, layers: list[int], lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()

    model = Model(layers)
    model.hparams.lr = 1
    model.hparams.layers.append(2)
    model.hparams_initial.layers.append(3)  # a copy each time
    assert model.hparams == {"layers": [1, 2], "lr": 1}
    assert model.hparams_initial == {"layers": [1], "lr": 0.1}
    assert model.hparams.layers is layers


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_of_the_module_keep_them(copied: Callable[[Any], Any]) -> None:
    model = Plain(0.1, dropout=0.5)
    model.hparams.lr = 1
    again = copied(model)
    again.hparams.hidden = 9
    assert again.hparams == {"lr": 1, "hidden": 9, "dropout": 0.5}
    assert again.hparams_initial == {"lr": 0.1, "hidden": 8, "dropout": 0.5}
    assert (again._hparams_name, again._log_hyperparams) == ("kwargs", True)
    assert model.hparams.hidden == 8


def test_values_that_cannot_be_copied_do_no_harm() -> None:
    lock, graph = threading.Lock(), torch.ones(1, requires_grad=True) * 2
    model = Plain(0.1, lock=lock, graph=graph)
    assert model.hparams_initial.lock is lock
    assert copy.deepcopy(model).hparams.graph is graph


def test_a_module_among_them_is_warned_of_and_not_copied() -> None:
    class Model(LightningModule):
        def __init__(self, backbone: nn.Module, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.backbone = backbone

    with pytest.warns(UserWarning, match=r"'backbone' is an nn.Module.*twice.*ignore=\['backbone'\]") as caught:
        model = Model(nn.Linear(2, 2))
    assert caught[0].filename == __file__  # it points at the call
    assert model.hparams_initial.backbone is model.backbone
    copied = copy.deepcopy(model)
    assert copied.hparams.backbone is copied.backbone  # the copy's own, and only one


def test_ignoring_the_module_is_silent() -> None:
    class Model(LightningModule):
        def __init__(self, backbone: nn.Module, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["backbone"])

    assert Model(nn.Linear(2, 2)).hparams == {"lr": 0.1}


def test_looking_at_frames_leaves_no_reference_cycle() -> None:
    gc.disable()
    try:
        model = Leaf(1.0)
        gone = weakref.ref(model)
        del model
        assert gone() is None  # at once: a model's memory does not wait for the collector
    finally:
        gc.enable()


def test_names_can_be_removed_later() -> None:
    class Net(LightningModule):
        def __init__(self, lr: float = 0.1, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    net = Net()
    net.remove_ignored_hparams(["lr", "absent"])
    assert dict(net.hparams) == dict(net.hparams_initial) == {"width": 3}


def test_names_beside_an_object_have_no_effect() -> None:
    class Both(LightningModule):
        def __init__(self, config: dict[str, Any], lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters(config, "lr")

    with pytest.warns(UserWarning, match="Both called save_hyperparameters with an object and with names, 'lr'"):
        assert dict(Both({"width": 2}, 0.5).hparams) == {"width": 2}
