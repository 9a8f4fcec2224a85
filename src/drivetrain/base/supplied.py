"""Functions that a lower layer declares and calls, and that a higher layer replaces. A table in
``drivetrain/__init__.py`` names the replacements, so a lower layer imports no higher layer. Without a replacement, the
function's own body runs.
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
    """Set the replacements of functions that are decorated with :func:`supplied`. ``functions`` maps the name of each
    function to the name of the replacement, both as "module:name".
    """
    _suppliers.update(functions)


def supplied(default: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that a higher layer may replace. The first call imports the module of the replacement.
    Without a replacement, ``default`` itself runs.
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
    """Return advice about a name that other libraries have and ``owner`` lacks; ``None`` if the name is unknown.

    Args:
        owner: the name of a package for an import, "Trainer" for an argument of the Trainer, "trainer",
            "LightningModule" or "Engine" for an attribute, and "a call" for an argument of another class or method.
        name: the missing name. For "a call", it includes the class or method, as in "ModelCheckpoint.filepath".
    """
    return None


@supplied
def in_our_layout(checkpoint: Any, resuming: bool = False) -> Any:
    """Convert another library's checkpoint to drivetrain's layout. Return any other value unchanged.

    Args:
        checkpoint: the data from the file. This function does not change the data.
        resuming: whether training resumes from the checkpoint. If so, a warning names the entries that the checkpoint
            lacks.
    """
    return checkpoint


@supplied
def warn_of_uncalled(cls: type, contract: str, caller: str) -> None:
    """Warn once per class about overrides that ``caller`` never calls.

    Args:
        cls: a user's class.
        contract: the name of the abstract base class.
        caller: "Trainer" or "Engine".
    """
