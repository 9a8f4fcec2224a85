"""The methods and attributes of precisions that have Lightning's names and signatures. These methods call the methods
of :class:`drivetrain.precision.precision.Precision`.

[Note: Lightning's signatures] drivetrain calls some methods with other arguments than Lightning. Lightning also passes
the model and the optimizer to ``backward``. Lightning always passes a closure to ``optimizer_step``, and drivetrain
only sometimes. drivetrain passes ``norm_type`` to clipping methods, and Lightning supports only the 2-norm. Lightning's
``forward_context`` may have a parameter for the device type. Lightning's ``state_dict`` and ``load_state_dict`` have no
parameters for the module and the optimizers. :func:`adapt` lets overrides have either signature.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import is_own_class, positional_arity, reads
from drivetrain.base.registry import Registry
from drivetrain.errors import ConfigurationError

Method = Callable[..., Any]

CLIPPING = frozenset({"clip_grad_by_value", "clip_grad_by_norm", "main_params"})
"""The methods that define which gradients are clipped, and how."""


class Familiar:
    """Methods and attributes with Lightning's names, which users can call and override."""

    scaler: Any = None
    """The gradient scaler, or ``None``."""

    name: str
    stepped: bool
    scale: Callable[[Tensor], Tensor]
    forward_context: Callable[[], AbstractContextManager[Any] | None]
    optimizer_step: Callable[..., Any]
    state_dict: Callable[..., dict[str, Any]]

    # the model and the optimizer of the running backward pass
    _backward_of: tuple[nn.Module | None, Optimizer | None] = (None, None)
    _is_differentiating: bool = False  # whether an override of backward is running
    _clips_by_members: bool = False  # whether a subclass overrides a method in CLIPPING
    _unscales: bool = False  # whether a subclass overrides unscaling
    # (method, optimizer) for each optimizer whose gradients were unscaled since its last step
    _unscaled_now: tuple[tuple[Any, Optimizer], ...] = ()

    @classmethod
    def register_precisions(cls, precision_registry: Registry[Any]) -> None:
        """Register the names under which users choose this class: ``precision_registry.register("name", cls,
        description="...")``.

        Called once, when a subclass that defines this method is created. No other registration is necessary. Further
        arguments of ``register`` are passed to the constructor of the class.
        """

    precision: str = reads(
        "name", 'An alias of ``name``; a subclass may set ``precision = "..."`` in its body.', writable=True
    )

    # ---- contexts ------------------------------------------------------------------------------------------------

    def module_init_context(self) -> AbstractContextManager[Any] | None:
        """Return a context in which the parameters of new layers have this precision, or ``None`` if no context is
        needed.

        The context is entered inside the context of ``tensor_init_context``.
        """
        return nullcontext()

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``training_step``. Each of the other steps has a similar method."""
        return self.forward_context() or nullcontext()

    val_step_context = test_step_context = predict_step_context = train_step_context

    # ---- a run of a Trainer --------------------------------------------------------------------------------------

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Return a model, optimizers and configurations of schedulers. The Trainer uses these objects instead of the
        arguments.

        Called once in each run, after the arguments were created. In evaluation and prediction there are no optimizers.
        """
        return model, optimizers, lr_schedulers

    # ---- gradients -----------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> Tensor:
        """Return the tensor that is differentiated instead of ``tensor``. The hooks ``on_before_backward`` also get the
        returned tensor.

        Args:
            tensor: the loss.
            module: the user's module; ``None`` in an Engine's loop.
        """
        return tensor

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Tensor:
        """Called after the backward pass with the result of :meth:`pre_backward`. The return value is ignored."""
        return tensor

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Do nothing. The closure of ``optimizer_step`` already does the work of Lightning's method."""

    def step(self, optimizer: Optimizer, **kwargs: Any) -> bool:
        """Call ``optimizer_step`` for gradients that were already computed. Return whether the optimizer was
        stepped.
        """
        self.stepped = True
        self.optimizer_step(optimizer, **kwargs)
        return self.stepped

    def unscale(self, optimizer: Optimizer) -> None:
        """An alias of ``unscale_gradients``. A subclass can override either method."""

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients are clipped."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the gradients of :meth:`main_params`."""
        clip_by_value(list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_norm(
        self, optimizer: Optimizer, clip_val: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        """Clip the gradients of :meth:`main_params` by their total norm, and return the norm before clipping."""
        parameters = list(self.main_params(optimizer))
        return torch.nn.utils.clip_grad_norm_(parameters, clip_val, norm_type, error_if_nonfinite)

    # ---- checkpoints between accumulated batches, for drivetrain's own loss scaling ------------------------------

    def deferred_state_dict(
        self, module: nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> Callable[[], dict[str, Any]]:
        """Record the current state. Return a function that later returns this state, in the form of :meth:`state_dict`.

        If a callback saves on exceptions, the loop calls this method before the batches of each optimizer step. This
        method must therefore not wait for the device. Override this method if ``state_dict`` reads from the device.
        """
        state = self.state_dict(module, optimizers)
        state = copy.deepcopy(state) if state else {}
        return lambda: state

    def restored_gradients(self, device: torch.device) -> None:
        """Called after gradients were restored from a checkpoint that was saved between accumulated batches. The
        restored gradients are still scaled.
        """


# ---- how the library calls overrides of these names ------------------------------------------------------------------


def differentiate(
    precision: Familiar,
    loss: Tensor,
    module: nn.Module | None,
    optimizer: Optimizer | None,
    backward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call ``backward(loss, *args, **kwargs)`` between :meth:`Familiar.pre_backward` and
    :meth:`Familiar.post_backward`.
    """
    precision._backward_of = (module, optimizer)
    loss = precision.pre_backward(loss, module)
    backward(loss, *args, **kwargs)
    precision.post_backward(loss, module)
    precision._backward_of = (None, None)


def backward_of_the_field(precision: Familiar, loss: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compute the gradients of ``loss``. As in Lightning, ``args`` or ``kwargs`` may begin with the model and the
    optimizer.

    An override that calls ``super().backward(tensor, model, optimizer)`` passes the model and the optimizer. A user's
    strategy also passes them if its ``backward`` is a copy of Lightning's. In that case, this function also calls the
    hooks and scales the loss.
    """
    if precision._is_differentiating:
        args = _without_parties(args)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("model", "optimizer")}
    elif "model" in kwargs or (args and (args[0] is None or isinstance(args[0], nn.Module))):
        parties = {name: kwargs.pop(name) for name in ("model", "optimizer") if name in kwargs}
        module: Any = parties.get("model", args[0] if args else None)
        args = _without_parties(args)
        if getattr(module, "_trainer", None) is not None:
            module.trainer.strategy.driver.differentiate(loss, *args, **kwargs)
            return
        loss = precision.scale(loss)  # outside of a run, no strategy scales the loss
    loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]


def _without_parties(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` without the model and the optimizer at its beginning."""
    if args and (args[0] is None or isinstance(args[0], nn.Module)):
        args = args[1:]
        if args and (args[0] is None or isinstance(args[0], Optimizer)):
            args = args[1:]
    return args


def end_step(precision: Familiar, optimizer: Optimizer) -> None:
    """Record that ``optimizer`` has stepped or skipped its step, so that its next gradients are unscaled again."""
    if precision._unscaled_now:
        precision._unscaled_now = tuple(pair for pair in precision._unscaled_now if pair[1] is not optimizer)


def clips_by_members(precision: Familiar) -> bool:
    """Return whether a subclass overrides one of :data:`CLIPPING`."""
    return precision._clips_by_members


def clip_by_value(parameters: list[Tensor] | list[nn.Parameter], clip_val: float) -> None:
    """Clip each element of the gradients of ``parameters``."""
    if any(each.grad is not None for each in parameters):  # without gradients, torch raises an error
        torch.nn.utils.clip_grad_value_(parameters, clip_val)


# ---- overrides with Lightning's signatures ---------------------------------------------------------------------------


def adapt(cls: type[Any]) -> None:
    """Wrap the methods of ``cls`` that may have Lightning's signatures. drivetrain can then call these methods with
    drivetrain's signatures.
    """
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
    if "unscale_gradients" in own and "unscale" not in own:
        cls.unscale = cls.unscale_gradients
    elif "unscale" in own and "unscale_gradients" not in own:
        cls.unscale_gradients = cls.unscale
    cls._unscales = cls._unscales or "unscale" in own
    cls._clips_by_members = cls._clips_by_members or not own.keys().isdisjoint(CLIPPING)


def _backward(method: Method) -> Method:
    parties = max(0, min(2, _named(method) - 1))  # the number of parameters for model and optimizer

    @functools.wraps(method)
    def backward(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_differentiating:  # called by an override through super()
            return method(self, tensor, *args, **kwargs)
        if args and isinstance(args[0], nn.Module):  # called by a strategy whose ``backward`` is Lightning's
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
    needs_closure = _named(method) >= 3 and parameters[3].default is not None
    lacks_model = _named(method) < 2
    if any(each.kind is each.VAR_POSITIONAL for each in parameters) or not (needs_closure or lacks_model):
        return method

    @functools.wraps(method)
    def optimizer_step(self: Any, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        if needs_closure:
            return method(self, optimizer, model, _no_loss if closure is None else closure, **kwargs)
        given = kwargs if closure is None else {"closure": closure, **kwargs}
        return method(self, optimizer, **given)

    return optimizer_step


def _no_loss() -> None:
    """The closure for an optimizer step whose gradients are already computed. Does nothing."""


def _once_per_step(method: Method) -> Method:
    """Wrap ``method``, which unscales gradients. Clipping calls it, and so does the optimizer's step. Only the first
    call before each step has an effect.
    """

    @functools.wraps(method)
    def unscale_gradients(self: Any, optimizer: Any) -> None:
        if not any(known is method and other is optimizer for known, other in self._unscaled_now):
            self._unscaled_now = (*self._unscaled_now, (method, optimizer))
            method(self, optimizer)

    return unscale_gradients


def _without(*names: str, kept: int) -> Callable[[Method], Method]:
    """Return a decorator for a method that may lack the parameters ``names``, which follow the first ``kept``
    parameters. If the method lacks one of them, the decorated method accepts and drops these arguments.
    """

    def wrap(method: Method) -> Method:
        if positional_arity(method) - 1 >= kept + len(names):
            return method

        @functools.wraps(method)
        def without(self: Any, *args: Any, **kwargs: Any) -> Any:
            dropped = dict(zip(names, args[kept:], strict=False))
            dropped |= {name: kwargs.pop(name) for name in names if name in kwargs}
            if (norm_type := dropped.get("norm_type", 2.0)) != 2.0:
                raise ConfigurationError(
                    f"norm_type={norm_type}: {type(self).__name__} overrides {method.__name__} without this argument. "
                    "Add norm_type and error_if_nonfinite to it, or leave norm_type out."
                )
            return method(self, *args[:kept], **kwargs)

        return without

    return wrap


def _forward_context(method: Method) -> Method:
    if _named(method) == 0:
        return method

    @functools.wraps(method)
    def forward_context(self: Any, device_type: str | None = None) -> Any:
        return method(self, device_type or self.device_type)

    return forward_context


def _named(method: Method) -> int:
    """Return the number of named positional parameters of ``method``, without ``self``."""
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    named = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return max(0, named - 1)


_WRAPS: dict[str, Callable[[Method], Method]] = {
    "backward": _backward,
    "optimizer_step": _optimizer_step,
    "clip_gradients": _without("norm_type", "error_if_nonfinite", kept=3),
    "clip_grad_by_norm": _without("norm_type", "error_if_nonfinite", kept=2),
    "forward_context": _forward_context,
    "state_dict": _without("module", "optimizers", kept=0),
    "load_state_dict": _without("module", "optimizers", kept=1),
}
