"""Hooks of Lightning 1.x that drivetrain lacks or calls with other arguments. The default hooks do nothing; overrides
can call the default hooks with ``super()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Default:
    """A hook that accepts all arguments and does nothing. A Trainer treats such a hook as not overridden.

    Args:
        today: drivetrain's base class. ``__func__`` is the method ``name`` of this class. The Trainer compares
            ``__func__`` with this method, and finds no override.
        name: the name of the hook.
    """

    def __init__(self, today: type, name: str) -> None:
        self.__func__ = getattr(today, name, None)
        self.__name__, self.__doc__ = name, f"``{name}`` of that time, to be overridden."
        self._returns_first = name.endswith("_step_end")

    def __get__(self, instance: Any, owner: type | None = None) -> Default:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if self._returns_first and args else None


def set_defaults(cls: type, today: type, names: Iterable[str]) -> None:
    """For each name, add to ``cls`` a hook that does nothing."""
    for name in names:
        setattr(cls, name, Default(today, name))


def hook_of(party: Any, name: str) -> Any:
    """Return the hook ``name`` of a module or a callback; ``None`` if the user has not defined the hook."""
    hook = getattr(party, name, None)
    return None if isinstance(hook, Default) or not callable(hook) else hook
