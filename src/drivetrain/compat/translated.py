"""Converts objects of another API that a program passes to the Trainer. Their method ``as_settings()`` returns
drivetrain's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.engine.parts import listed
from drivetrain.errors import ConfigurationError, shown

_MAY_BE_FOREIGN = ("accelerator", "strategy")
_LISTS = ("plugins", "callbacks")


def is_foreign(value: Any) -> bool:
    """Whether ``value`` is an object with a method ``as_settings()``, and not a class."""
    return not isinstance(value, type) and callable(getattr(value, "as_settings", None))


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments. In place of each object of another API, they contain what its ``as_settings()``
    returns.

    The object can be ``accelerator``, ``strategy``, or one of ``plugins``. ``as_settings()`` returns a dictionary of
    the Trainer's arguments. Its ``plugins`` and ``callbacks`` are added to those of the program. For other arguments,
    the program must not pass a different value.

    Raises:
        ConfigurationError: the object and the program set one argument to different values.
    """
    arguments = dict(given)
    for name in _MAY_BE_FOREIGN:
        value: Any = arguments.get(name)
        if is_foreign(value):
            del arguments[name]
            _add(arguments, value, value.as_settings())
    plugins = listed(arguments.get("plugins"))
    if foreign := [each for each in plugins if is_foreign(each)]:
        arguments["plugins"] = [each for each in plugins if not is_foreign(each)]
        for each in foreign:
            _add(arguments, each, each.as_settings())
    return arguments


def _add(arguments: dict[str, Any], owner: Any, meant: Mapping[str, Any]) -> None:
    for name, value in meant.items():
        if name in _LISTS:
            arguments[name] = [*listed(arguments.get(name)), *listed(value)]
        elif name not in arguments or arguments[name] == "auto":
            arguments[name] = value
        elif value != "auto" and arguments[name] != value:
            raise ConfigurationError(
                f"Trainer got {name}={shown(arguments[name])} and a {type(owner).__name__}, which means "
                f"{name}={shown(value)}. Leave one of them out."
            )
