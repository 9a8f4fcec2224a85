"""Functions that a lower layer declares and calls, and that a higher layer defines. If a program does not contain the
higher layer, a default runs.

The lower layer does not name the higher one, because the table in ``drivetrain/__init__.py`` connects the functions.
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
    """For each function that is decorated with :func:`supplied`, set the function that runs instead, both as
    "module:name".
    """
    _suppliers.update(functions)


def supplied(default: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that a higher layer may replace; ``default``, the decorated function, runs without that
    layer.

    The module of the replacing function is imported when the function is called.
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
    """Return what to write instead of a name that other libraries have and ``owner`` lacks; ``None`` if nothing is
    known about the name.

    Args:
        owner: what lacks the name: a package; "Trainer" for an argument of the Trainer; "trainer", "LightningModule" or
            "Engine" for an attribute; "a call" for an argument of another class or of a method.
        name: the name; for "a call", the class or method comes first, as in "ModelCheckpoint.filepath".
    """
    return None


@supplied
def in_our_layout(checkpoint: Any, resuming: bool = False) -> Any:
    """Convert another library's checkpoint to drivetrain's layout; return any other value unchanged.

    Args:
        checkpoint: the data that was read, which is not changed.
        resuming: whether training resumes from the checkpoint; if so, a warning names what the checkpoint lacks.
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
