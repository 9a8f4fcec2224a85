"""Functions that a lower layer declares and calls, and a higher layer supplies; a program without it runs the default.

No lower layer names the higher one: the table in ``drivetrain/__init__.py`` connects them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_suppliers: dict[str, str] = {}


def supply(functions: Mapping[str, str]) -> None:
    """Connect functions that are decorated with :func:`supplied` to those that replace them, each "module:name"."""
    _suppliers.update(functions)


def supplied(default: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that a higher layer supplies; ``default`` is what happens without that layer.

    The other function's module is imported when the function is called.
    """
    key = f"{default.__module__}:{default.__name__}"

    @functools.wraps(default)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        module, _, name = _suppliers.get(key, "").partition(":")
        function = getattr(importlib.import_module(module), name) if module else default
        return function(*args, **kwargs)

    return call


@supplied
def instead_of(owner: str, name: str) -> str | None:
    """Return what to write instead of a name that other libraries have and ``owner`` lacks; ``None`` if it is unknown.

    Args:
        owner: a package, "Trainer" for its arguments, or "Engine" for its attributes.
        name: the name.
    """
    return None


@supplied
def in_our_layout(checkpoint: Any, resuming: bool = False) -> Any:
    """Convert another library's checkpoint to drivetrain's layout; return any other value unchanged.

    Args:
        checkpoint: the data that was read, which is not changed.
        resuming: whether training resumes from it; a warning then names what the checkpoint lacks.
    """
    return checkpoint


@supplied
def warn_of_uncalled(cls: type, contract: str, caller: str) -> None:
    """Warn once per class about overrides that ``caller`` never calls.

    Args:
        cls: a user's class.
        contract: the name of its contract.
        caller: "Trainer" or "Engine".
    """
