"""Run any method of a module through the wrapper that a strategy has put around the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def redirected(
    method: Callable[..., Any], module: nn.Module, wrapped: nn.Module, always: bool = False
) -> Callable[..., Any]:
    """Return a function that runs ``method`` of ``module`` as a forward pass of the wrapper ``wrapped``.

    A wrapper such as DDP intercepts ``forward``, but training calls ``training_step``. The returned function therefore
    calls the wrapper. When the wrapper calls the module's ``forward``, ``method`` runs instead. Inside ``method``,
    ``self(x)`` runs the real ``forward``. The real ``forward`` is also restored after an exception.

    A wrapper that runs copies of the module cannot be used in this way. The class of such a wrapper defines
    ``runs(method)``, and this function returns the result of ``runs``.

    If a strategy has changed the module in place, as FSDP2 does, ``wrapped`` is the module itself. In this case pass
    ``always=True``, so that the returned function calls the module's ``__call__``.
    """
    if wrapped is module and not always:
        return method
    if (runs := getattr(type(wrapped), "runs", None)) is not None:
        return runs(wrapped, method)

    attributes = module.__dict__

    def through(*args: Any, **kwargs: Any) -> Any:
        own = attributes.get("forward")

        def once(*args: Any, **kwargs: Any) -> Any:
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own
            return method(*args, **kwargs)

        attributes["forward"] = once
        try:
            return wrapped(*args, **kwargs)
        finally:
            if attributes.get("forward") is once:  # the wrapper has not called forward
                del attributes["forward"]
                if own is not None:
                    attributes["forward"] = own

    return through


def leaves_gradients(model: nn.Module | None) -> bool:
    """Return whether ``model`` is torch's DDP inside ``no_sync()``. Backward passes then do not communicate."""
    return not getattr(model, "require_backward_grad_sync", True)
