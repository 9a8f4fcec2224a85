"""Run any method of a module through the wrapper that a strategy put around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def redirected(
    method: Callable[..., Any], module: nn.Module, wrapped: nn.Module, always: bool = False
) -> Callable[..., Any]:
    """Return a function that runs ``method`` of ``module`` as a forward pass of the wrapper ``wrapped``.

    A wrapper such as DDP intercepts ``forward``, but training calls ``training_step``. So the wrapper is called, and
    the wrapper's call of the module's ``forward`` runs ``method`` once: inside it, ``self(x)`` runs the real
    ``forward``, which is also restored after an exception.

    A wrapper that runs copies of the module cannot find the method there; its class defines ``runs(method)``, which
    returns the callable to use.

    A module that was wrapped in place is its own wrapper: with ``always``, the function calls its ``__call__``.
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
            if attributes.get("forward") is once:  # the wrapper has never called forward
                del attributes["forward"]
                if own is not None:
                    attributes["forward"] = own

    return through


def leaves_gradients(model: nn.Module | None) -> bool:
    """Return whether ``model`` is torch's wrapper inside its ``no_sync()``, so that backward passes do not
    communicate.
    """
    return not getattr(model, "require_backward_grad_sync", True)
