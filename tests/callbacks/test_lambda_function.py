from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.base.introspect import overrides
from drivetrain.callbacks import LambdaCallback
from drivetrain.errors import ConfigurationError, UnknownArgumentError


def test_functions_are_called_as_hooks(validated: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    seen: list[Any] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(batch_idx),
        on_validation_end=lambda trainer, module: seen.append("validated"),
        on_fit_end=None,
    )
    make_trainer(callbacks=callback, limit_train_batches=2, num_sanity_val_steps=0).fit(validated(), loader, loader)

    assert seen == ["fit", 0, 1, "validated"]


def test_hooks_that_are_not_given_cost_nothing() -> None:
    callback = LambdaCallback(on_fit_start=lambda trainer, module: None)
    hooks = [name for name, value in vars(Callback).items() if callable(value) and not name.startswith("_")]
    assert [name for name in hooks if overrides(callback, name, Callback)] == ["on_fit_start"]


def test_every_hook_of_a_callback_may_be_given() -> None:
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    callback = LambdaCallback(**{name: lambda *_: None for name in [*hooks, "setup", "teardown"]})
    assert all(overrides(callback, name, Callback) for name in hooks)


def test_the_signature_lists_the_hooks() -> None:
    parameters = inspect.signature(LambdaCallback).parameters
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    assert list(parameters) == ["setup", "teardown", *hooks]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())

    class Own(LambdaCallback):
        def __init__(self, prefix: str) -> None:
            super().__init__(on_fit_start=lambda *_: print(prefix))

    assert list(inspect.signature(Own).parameters) == ["prefix"]


def test_several_of_them_coexist(regression: Any, loader: DataLoader[Any], make_trainer: Any) -> None:
    seen: list[str] = []
    callbacks = [LambdaCallback(on_fit_start=lambda *_, name=name: seen.append(name)) for name in ("a", "b")]
    make_trainer(callbacks=callbacks).fit(regression(), loader)
    assert seen == ["a", "b"]


def test_wrong_hooks() -> None:
    with pytest.raises(UnknownArgumentError, match="no hook 'on_train_epoch_ends'. Did you mean 'on_train_epoch_end'"):
        LambdaCallback(on_train_epoch_ends=print)
    with pytest.raises(ConfigurationError, match="no hook 'state_dict'"):
        LambdaCallback(state_dict=dict)
    with pytest.raises(ConfigurationError, match="got a int. Pass a function"):
        LambdaCallback(on_fit_end=3)  # type: ignore[arg-type]
