"""The contract of a numeric precision, and the registry; the base class is plain 32-bit floats."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import is_own_class
from drivetrain.base.registry import Registry, names_itself
from drivetrain.base.tree import map_leaves

ClipAlgorithm = Literal["norm", "value"]


class Precision:
    """Full 32-bit precision ("32-true"): nothing is converted, nothing is scaled.

    A new precision is a file in this folder, or in a package of its own, with one such class: it gives itself names in
    :meth:`register_precisions`, and each is a value of ``precision=``. A member that a subclass does not override is
    not called in a step. Overrides may have the signatures of the field.
    """

    members_table: ClassVar[str] = "drivetrain.precision._members:MEMBERS"

    name: str = "32-true"
    """What plans and checkpoints call it; a subclass may also write it as ``precision``."""

    computes_in: torch.dtype | None = None
    """The type that the accelerator must compute in; ``None``: 32-bit floats, which all do."""

    scales_loss: bool = False
    """Whether the gradients of a run are scaled: only then are ``scale``, ``unscale_gradients`` and ``step`` called."""

    packs_weights: bool = False
    """Whether it packs weights into tensors of integers, which no strategy can shard."""

    stepped: bool = True
    """Whether the last ``step`` really stepped.

    An override of ``optimizer_step`` may set it to False after a skip; ``global_step`` then does not count that step.
    """

    scaler: Any = None
    """The gradient scaler, if there is one."""

    device_type: str = "cpu"
    """The type of the device that steps run on, as ``torch.autocast`` takes it; bound when the run is set up."""

    _backward_of: tuple[nn.Module | None, Optimizer | None] = (None, None)  # of the backward pass that runs
    _is_differentiating: bool = False  # an override of backward runs
    _unscaled_now: tuple[tuple[Any, Optimizer], ...] = ()  # by what, and whose gradients, since their last step
    _unscales: bool = False  # a subclass says how gradients are unscaled
    _clips_itself: bool = False  # a subclass says how, or which parameters

    # ---- names ---------------------------------------------------------------------------------------------------

    @classmethod
    def register_precisions(cls, precision_registry: Registry[Precision]) -> None:
        """Give the class its names: ``precision_registry.register("name", cls, description="...")``.

        Called once, when a subclass that defines it is defined, so that no other line is needed. Further arguments of
        ``register`` are arguments of the constructor.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if not is_own_class(cls):
            from drivetrain.precision._familiar import adapt  # here, because drivetrain's own need it not

            adapt(cls)
        if "unscale_gradients" in own and "unscale" not in own:
            cls.unscale = cls.unscale_gradients
        elif "unscale" in own and "unscale_gradients" not in own:
            cls.unscale_gradients = cls.unscale  # type: ignore[method-assign]
        cls._unscales = cls._unscales or ("unscale" in own and not is_own_class(cls))
        cls._clips_itself = cls._clips_itself or not own.keys().isdisjoint(_CLIPPING)
        names_itself(cls, "register_precisions", PrecisionRegistry)

    @property
    def precision(self) -> str:
        """The same as ``name``."""
        return self.name

    @precision.setter
    def precision(self, name: str) -> None:
        self.name = name

    # ---- numbers -------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its parameters in this precision; called once, before the optimizers exist."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return a batch with its floating-point tensors in this precision; called only if a subclass overrides it."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Return what a module that an Engine has set up returns, in the type that the loop expects.

        Called only if a subclass overrides it, and by an Engine: a Trainer leaves the outputs of steps as they are.
        """
        return data

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return a context for a forward pass on :attr:`device_type`; ``None`` if none is needed.

        ``None`` and not an empty context, because entering even an empty one costs time in every step. drivetrain's own
        contexts are entered again and again; one that a subclass of yours returns is entered once.
        """
        return None

    def tensor_init_context(self) -> AbstractContextManager[Any] | None:
        """Return a context in which new tensors have this precision; an override may return ``None`` for none."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any] | None:
        """Return a context in which the parameters of new layers have this precision, or ``None``.

        It is entered inside that of :meth:`tensor_init_context`.
        """
        return nullcontext()

    def bind_device(self, device_type: str) -> None:
        """Set :attr:`device_type`, for the contexts that follow."""
        self.device_type = device_type

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``training_step``; the three others are the same for theirs."""
        return self.forward_context() or nullcontext()

    def val_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``validation_step``."""
        return self.forward_context() or nullcontext()

    def test_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``test_step``."""
        return self.forward_context() or nullcontext()

    def predict_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``predict_step``."""
        return self.forward_context() or nullcontext()

    # ---- life ----------------------------------------------------------------------------------------------------

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Return what a Trainer uses in place of the model, its optimizers and the configurations of its schedulers.

        Called in each run when they are made; without optimizers in evaluation and prediction.
        """
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Free what this precision holds; called when a run ends, also after an exception."""

    # ---- gradients -----------------------------------------------------------------------------------------------

    def bind(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers of the run that begins: all of them."""

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> Tensor:
        """Return the tensor to differentiate in place of ``tensor``; the hooks ``on_before_backward`` get it.

        Args:
            tensor: the loss.
            module: the user's; ``None`` in an Engine's loop.
        """
        return tensor

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``, between the hooks ``on_before_backward`` and ``on_after_backward``.

        An override may have the signature of the field, ``(tensor, model, optimizer, *args, **kwargs)``. A strategy's
        own ``backward`` may call it so too: then the hooks around it and the scaling are part of it.
        """
        if self._is_differentiating:
            args = _without_parties(args)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("model", "optimizer")}
        elif args and isinstance(args[0], nn.Module):
            module: Any = args[0]
            module.trainer.strategy.driver.differentiate(loss, *args[2:], **kwargs)
            return
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Tensor:
        """Called after the backward pass with what :meth:`pre_backward` returned; the result is not used."""
        return tensor

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer`` in this precision, and return what ``closure`` returns.

        Args:
            optimizer: the user's.
            model: whose parameters are stepped.
            closure: runs the forward and backward pass, and returns the loss. Afterwards the gradients are unscaled if
                :attr:`scales_loss`, the hooks ``on_before_optimizer_step`` have seen them and they are clipped.
                ``None``: the gradients are there.
            kwargs: for ``optimizer.step``.
        """
        if not self.scales_loss:
            return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        loss = None
        if closure is not None:  # before the step and not inside: the scaler looks at the gradients first
            with torch.enable_grad():
                loss = closure()
        self.step(optimizer, **kwargs)
        return loss

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Nothing: the closure that :meth:`optimizer_step` gets has done already what the field does here."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate in place of ``loss``."""
        return loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Give this optimizer's parameters their true gradients; a second call before its step does nothing."""

    unscale = unscale_gradients

    def step(self, optimizer: Optimizer, **kwargs: Any) -> bool:
        """Step the optimizer; return whether it really stepped, which a scaled loss may prevent."""
        optimizer.step(**kwargs)
        if self._unscaled_now:
            self.end_step(optimizer)
        return True

    def end_step(self, optimizer: Optimizer) -> None:
        """Forget that the gradients of ``optimizer`` are unscaled: it has stepped, or skipped its step."""
        self._unscaled_now = tuple(pair for pair in self._unscaled_now if pair[1] is not optimizer)

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Yield the parameters whose gradients are clipped."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: ClipAlgorithm = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip the gradients of this optimizer's parameters and of no others, unscaled.

        An override may take the first three arguments only: then ``norm_type`` is 2, and a norm that is not finite is
        its own business.

        Args:
            optimizer: whose parameters; those without a gradient are skipped.
            clip_val: the largest norm of all of them together ("norm"), or of each element's absolute value ("value").
                Not positive: nothing happens.
            gradient_clip_algorithm: "norm" or "value".
            norm_type: which norm; ``inf`` is the largest element.
            error_if_nonfinite: raise RuntimeError if the norm is no number; that reads the device.

        Returns:
            The norm before clipping, on the device; ``None`` where none was computed.
        """
        if clip_val <= 0:
            return None
        if self.scales_loss or self._unscales:
            self.unscale(optimizer)
        if self._clips_itself:
            if gradient_clip_algorithm == "value":
                self.clip_grad_by_value(optimizer, clip_val)
                return None
            return self.clip_grad_by_norm(optimizer, clip_val, norm_type, error_if_nonfinite)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_algorithm == "value":
            _clip_by_value(parameters, clip_val)
            return None
        return torch.nn.utils.clip_grad_norm_(parameters, clip_val, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the gradients of :meth:`main_params`."""
        _clip_by_value(list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_norm(
        self, optimizer: Optimizer, clip_val: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        """Clip the gradients of :meth:`main_params` by their total norm, and return the norm before."""
        return torch.nn.utils.clip_grad_norm_(
            list(self.main_params(optimizer)), clip_val, norm_type, error_if_nonfinite
        )

    # ---- state ---------------------------------------------------------------------------------------------------

    def restored_gradients(self, device: torch.device) -> None:
        """A checkpoint has brought gradients of a window that is not complete, as this precision had made them."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart."""
        return {}

    def deferred_state_dict(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns what :meth:`state_dict` would return now.

        The loop calls this at the start of each window while a callback saves on exceptions, so it must not wait for
        the device: override it where :meth:`state_dict` reads one.
        """
        state = copy.deepcopy(self.state_dict())
        return lambda: state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""


def _to_default_dtype(leaf: Any) -> Any:
    return leaf.to(torch.get_default_dtype()) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


in_default_dtype: Callable[[Any], Any] = functools.partial(map_leaves, _to_default_dtype)
"""Returns its argument with every floating-point tensor in torch's default type."""


def _without_parties(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a field's ``backward`` after the tensor without the model and the optimizer."""
    if args and (args[0] is None or isinstance(args[0], nn.Module)):
        args = args[1:]
        if args and (args[0] is None or isinstance(args[0], Optimizer)):
            args = args[1:]
    return args


def _clip_by_value(parameters: list[Tensor], clip_val: float) -> None:
    if any(each.grad is not None for each in parameters):  # or torch raises an error
        torch.nn.utils.clip_grad_value_(parameters, clip_val)


_CLIPPING = frozenset({"clip_grad_by_value", "clip_grad_by_norm", "main_params"})

_MEANT = {
    "16-mixed": "fp16 float16 f16 half 16bit amp mixed fp16-mixed float16-mixed half-mixed",
    "16-true": "fp16-true float16-true half-true",
    "bf16-mixed": "bfloat16 bfloat bfloat16-mixed amp-bf16",
    "bf16-true": "bfloat16-true",
    "32-true": "fp32 float32 f32 float full single 32bit fp32-true float32-true",
    "64-true": "fp64 float64 f64 double 64bit fp64-true float64-true",
    "float8": "fp8 fp8-mixed float8-mixed f8 float8-e4m3fn float8-e5m2 torchao",
}
"""For each precision, what other libraries and torch call it."""


def precision_meant(given: object) -> str | None:
    """Return the name of the precision that another library or torch calls ``given``; ``None`` if none does."""
    word = str(given).lower().removeprefix("torch.").replace("_", "-")
    return next((name for name, words in _MEANT.items() if word in words.split()), None)


PrecisionRegistry: Registry[Precision] = Registry("drivetrain.precision", "precision", "precision", by_file=False)
"""The precisions by name: those of the files beside this one, of users, and of installed packages."""

for _name in ("32-true", "32"):  # a class's own definition does not call its __init_subclass__
    PrecisionRegistry.register(_name, Precision)
