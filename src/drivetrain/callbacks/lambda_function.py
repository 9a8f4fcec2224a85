"""A callback whose hooks are functions that the user passes."""

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
    """Calls each given function in one hook. Hooks without a function cost nothing.

    ::

        LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.callback_metrics))

    Args:
        hooks: functions, each with the name of a hook of :class:`~drivetrain.Callback`. Each function gets the
            arguments of its hook.

    Raises:
        UnknownArgumentError: the hook does not exist.
        ConfigurationError: a hook's value is not callable.
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


# This signature lists the hooks by name, for help() and editors
vars(LambdaCallback.__init__)["__signature__"] = inspect.Signature(
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _HOOKS),
    ]
)
