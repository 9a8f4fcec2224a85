"""Overrides of a user's precision that have the signatures of the field, made callable with drivetrain's.

drivetrain calls ``backward(loss, ...)`` between the hooks around it, ``optimizer_step(optimizer, model, closure, ...)``
also without a closure, and clips with a type of norm. The field's ``backward`` also takes the model and the optimizer,
its ``optimizer_step`` needs a closure, or takes it as a keyword, and its clipping knows one norm. A ``forward_context``
that takes the type of the device gets it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.base.introspect import is_own_class, positional_arity
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.precision.precision import Precision

Method = Callable[..., Any]


def adapt(cls: type[Precision]) -> None:
    """Let drivetrain call what ``cls`` itself defines."""
    own = vars(cls)
    if isinstance(name := own.get("precision"), str):
        cls.name = name
        del cls.precision
    for member, wrap in _WRAPS.items():
        if inspect.isfunction(method := own.get(member)):
            setattr(cls, member, wrap(method))
    for member in ("unscale_gradients", "unscale"):
        inherited = next(base for base in cls.__mro__[1:] if member in vars(base))
        guards_itself = is_own_class(inherited) and inherited.__name__ != "Precision"
        if inspect.isfunction(method := own.get(member)) and not guards_itself:
            setattr(cls, member, _once_per_step(method))


def _backward(method: Method) -> Method:
    parties = max(0, min(2, _named(method) - 1))  # the model; the model and the optimizer

    @functools.wraps(method)
    def backward(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_differentiating:  # called by super() of an override
            return method(self, tensor, *args, **kwargs)
        if args and isinstance(args[0], nn.Module):  # called by a strategy that writes out the field's body
            module: Any = args[0]
            return module.trainer.strategy.driver.differentiate(tensor, *args[2:], **kwargs)
        self._is_differentiating = True
        try:
            return method(self, tensor, *self._backward_of[:parties], *args, **kwargs)
        finally:
            self._is_differentiating = False

    return backward


def _optimizer_step(method: Method) -> Method:
    parameters = list(inspect.signature(method).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return method
    if _named(method) < 2:

        @functools.wraps(method)
        def without_model(self: Any, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
            given = kwargs if closure is None else {"closure": closure, **kwargs}
            return method(self, optimizer, **given)

        return without_model
    if _named(method) < 3 or parameters[3].default is None:
        return method

    @functools.wraps(method)
    def with_closure(self: Any, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        return method(self, optimizer, model, _no_loss if closure is None else closure, **kwargs)

    return with_closure


def _no_loss() -> None:
    """The closure where the gradients are there."""


def _clip_gradients(method: Method) -> Method:
    if _takes(method, 5):
        return method

    @functools.wraps(method)
    def clip_gradients(
        self: Any,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: str = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Any:
        _check_norm(self, "clip_gradients", norm_type)
        return method(self, optimizer, clip_val, gradient_clip_algorithm)

    return clip_gradients


def _clip_grad_by_norm(method: Method) -> Method:
    if _takes(method, 4):
        return method

    @functools.wraps(method)
    def clip_grad_by_norm(
        self: Any, optimizer: Any, clip_val: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Any:
        _check_norm(self, "clip_grad_by_norm", norm_type)
        return method(self, optimizer, clip_val)

    return clip_grad_by_norm


def _check_norm(precision: Precision, member: str, norm_type: float) -> None:
    if norm_type != 2.0:
        raise ConfigurationError(
            f"norm_type={norm_type}: {type(precision).__name__} overrides {member} without this argument. "
            "Add norm_type and error_if_nonfinite to it, or leave norm_type out."
        )


def _once_per_step(method: Method) -> Method:
    """Let a second call before the optimizer's step do nothing: clipping and the step itself both ask for it."""

    @functools.wraps(method)
    def unscale_gradients(self: Any, optimizer: Any) -> None:
        if not any(known is method and other is optimizer for known, other in self._unscaled_now):
            self._unscaled_now = (*self._unscaled_now, (method, optimizer))
            method(self, optimizer)

    return unscale_gradients


def _step(method: Method) -> Method:
    @functools.wraps(method)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, optimizer, *args, **kwargs)
        finally:
            self.end_step(optimizer)

    return step


def _forward_context(method: Method) -> Method:
    if _named(method) == 0:
        return method

    @functools.wraps(method)
    def forward_context(self: Any, device_type: str | None = None) -> Any:
        return method(self, device_type or self.device_type)

    return forward_context


def _named(method: Method) -> int:
    """Return how many arguments ``method`` takes by position and names, without ``self``."""
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    named = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return max(0, named - 1)


def _takes(method: Method, count: int) -> bool:
    return positional_arity(method) - 1 >= count


_WRAPS: dict[str, Callable[[Method], Method]] = {
    "backward": _backward,
    "optimizer_step": _optimizer_step,
    "step": _step,
    "clip_gradients": _clip_gradients,
    "clip_grad_by_norm": _clip_grad_by_norm,
    "forward_context": _forward_context,
}
