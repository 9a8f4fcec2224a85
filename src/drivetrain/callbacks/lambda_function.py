"""Callbacks made of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, UnknownArgumentError, did_you_mean

_HOOKS = tuple(
    name
    for name, value in vars(Callback).items()
    if callable(value) and (name.startswith("on_") or name in ("setup", "teardown"))
)


class LambdaCallback(Callback):
    """A function for each hook that is given; one that is not costs nothing.

    ::

        LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.callback_metrics))

    Args:
        hooks: by the name of a :class:`~drivetrain.Callback` hook, a function with that hook's arguments.

    Raises:
        UnknownArgumentError: there is no such hook.
        ConfigurationError: a hook is given something that cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        super().__init__()
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise UnknownArgumentError(f"A callback has no hook {name!r}. {did_you_mean(name, _HOOKS)}")
            if function is None:
                continue
            if not callable(function):
                raise ConfigurationError(
                    f"LambdaCallback({name}={function!r}) got a {type(function).__name__}. Pass a function."
                )
            setattr(self, name, function)


# help() and editors list the hooks by name; the contract stays their only list
vars(LambdaCallback.__init__)["__signature__"] = inspect.Signature(
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _HOOKS),
    ]
)
