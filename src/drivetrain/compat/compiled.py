"""Lightning's ``utilities.compile``: get the LightningModule out of a result of ``torch.compile``."""

from __future__ import annotations

from typing import Any

from drivetrain.base.compiled import compiled_in_place, context_of, leave_uncompiled, original
from drivetrain.errors import WrongTypeError
from drivetrain.module.module import LightningModule


def from_compiled(model: Any) -> LightningModule:
    """Return the LightningModule inside a result of ``torch.compile``. Calls of this module run the compiled code.

    Raises:
        WrongTypeError: ``model`` is not a result of ``torch.compile``, or contains no LightningModule.
    """
    if original(model) is model:
        raise WrongTypeError(f"from_compiled got a {type(model).__name__}. Pass what torch.compile(module) returned.")
    _checked(original(model))
    return _checked(compiled_in_place(model))


def to_uncompiled(model: Any) -> LightningModule:
    """Make a compiled LightningModule run uncompiled, and return the LightningModule.

    Args:
        model: the result of ``torch.compile`` or :func:`from_compiled`, or a compiled module after a fit.

    Raises:
        WrongTypeError: ``model`` is not a LightningModule, or is not compiled.
    """
    module = _checked(original(model))
    if module is model and context_of(module) is None:
        raise WrongTypeError(f"to_uncompiled got a {type(model).__name__} that is not compiled. Leave the call out.")
    leave_uncompiled(module)
    return module


def _maybe_unwrap_optimized(model: Any) -> LightningModule:
    """Return ``from_compiled(model)`` if ``model`` is a result of ``torch.compile``; otherwise return ``model``."""
    return _checked(model) if original(model) is model else from_compiled(model)


def _checked(module: Any) -> LightningModule:
    if not isinstance(module, LightningModule):
        raise WrongTypeError(f"Expected a LightningModule, and got a {type(module).__name__}. Pass one.")
    return module
