"""The base class of numeric precisions, and the registry of precisions. The base class itself is the precision
float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import is_own_class
from drivetrain.base.registry import Registry, names_itself
from drivetrain.base.tree import map_leaves
from drivetrain.precision.familiar import Familiar, adapt, backward_of_the_field, clip_by_value, end_step

ClipAlgorithm = Literal["norm", "value"]


class Precision(Familiar):
    """Full 32-bit precision ("32-true"): nothing is converted or scaled.

    To add a precision, write a subclass in its own file, in this folder or in a package. The subclass registers its
    names in ``register_precisions(cls, precision_registry)``. Users then write one of these names:
    ``Trainer(precision=name)``. A step calls only the methods that the subclass overrides. Methods with Lightning's
    names, such as ``pre_backward``, can also be overridden. Overrides can have Lightning's signatures: see
    :class:`drivetrain.precision.familiar.Familiar`.
    """

    name: str = "32-true"
    """The precision's name in plans and checkpoints. A subclass can set the attribute ``precision`` instead."""

    computes_in: torch.dtype | None = None
    """The dtype of this precision's computations, which the accelerator must support. ``None``: float32, which every
    accelerator supports.
    """

    scales_loss: bool = False
    """Whether the loss is scaled. With False, neither ``scale`` nor ``unscale_gradients`` is called in a step."""

    packs_weights: bool = False
    """Whether this precision packs weights into tensors of integers, which no strategy can shard."""

    stepped: bool = True
    """Whether the last ``optimizer_step`` really stepped. An override must set this attribute to False after a skipped
    step, because ``global_step`` does not count skipped steps.
    """

    device_type: str = "cpu"
    """The device type that ``torch.autocast`` gets, such as "cuda". Set before the first context is created."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not is_own_class(cls):
            adapt(cls)
        names_itself(cls, "register_precisions", PrecisionRegistry)

    # ---- numbers -------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its parameters in this precision. Called once, before the optimizers are created."""
        return module

    def convert_input(self, data: Any) -> Any:
        """Return a batch with its floating-point tensors in this precision. Called only if a subclass overrides this
        method.
        """
        return data

    def convert_output(self, data: Any) -> Any:
        """Convert the outputs of an Engine's module to the dtype that the user's loop expects.

        Only an Engine calls this method, and only if a subclass overrides the method. A Trainer does not convert the
        outputs of steps.
        """
        return data

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return a context for a forward pass on :attr:`device_type`, or ``None`` if no context is needed.

        Even an empty context costs time in every step, so return ``None`` instead of an empty context. For your
        subclass, the loop calls this method in every step, and enters each context once. For drivetrain's own
        precisions, the loop enters the same context object in every step.
        """
        return None

    def tensor_init_context(self) -> AbstractContextManager[Any] | None:
        """Return a context in which new tensors have this precision, or ``None`` if no context is needed."""
        return nullcontext()

    # ---- gradients -----------------------------------------------------------------------------------------------

    def bind(self, optimizers: Sequence[Optimizer]) -> None:
        """Store all optimizers of the run. Called when the run starts."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which the backward pass runs."""
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``, between the hooks ``on_before_backward`` and ``on_after_backward``.

        ``loss`` must be a result of :meth:`scale`. As in Lightning, a model may follow as the second argument. In that
        case, ``loss`` must not be scaled yet, and this method scales it. An override that calls ``super().backward``
        is the exception: it passes on the scaled loss, with or without the model.

        An override may have Lightning's signature ``(tensor, model, optimizer, *args, **kwargs)``. If a user's strategy
        calls this method with these arguments, the hooks also run.
        """
        if args or kwargs:
            backward_of_the_field(self, loss, args, kwargs)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of this optimizer's parameters. A second call before its step does nothing."""

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer`` in this precision, and return the result of ``closure``.

        Args:
            optimizer: the user's optimizer.
            model: the model whose parameters the optimizer updates.
            closure: a function that runs the forward and backward pass, and returns the loss. The closure also calls
                the hooks ``on_before_optimizer_step`` and clips the gradients. If :attr:`scales_loss` is True, the
                closure also unscales the gradients. ``None``: the gradients are already computed.
            kwargs: further arguments of ``optimizer.step``.
        """
        if not self.scales_loss:
            return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        loss = None
        # the closure is called before the step, because a scaler checks the gradients before the step
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_scaled(optimizer, **kwargs)
        return loss

    def _step_scaled(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step ``optimizer``, whose gradients come from a scaled loss."""
        optimizer.step(**kwargs)
        end_step(self, optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: ClipAlgorithm = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip the gradients of this optimizer's parameters. Scaled gradients are first unscaled.

        An override may have only the first three parameters. Such an override is called only for the 2-norm. It must
        itself check that the norm is finite.

        Args:
            optimizer: the optimizer with the parameters. Parameters without a gradient are skipped.
            clip_val: the largest norm of all gradients together ("norm"), or the largest absolute value of an element
                ("value"). 0 or negative: nothing is clipped.
            gradient_clip_algorithm: "norm" or "value".
            norm_type: the order of the norm. With ``inf``, the norm is the largest absolute value.
            error_if_nonfinite: raise RuntimeError if the norm is not finite. This check waits for the device.

        Returns:
            The norm before clipping, on the device; ``None`` if no norm was computed.
        """
        if clip_val <= 0:
            return None
        if self.scales_loss or self._unscales:
            self.unscale_gradients(optimizer)
        by_value = gradient_clip_algorithm == "value"
        if self._clips_by_members:
            if not by_value:
                return self.clip_grad_by_norm(optimizer, clip_val, norm_type, error_if_nonfinite)
            self.clip_grad_by_value(optimizer, clip_val)
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if by_value:
            clip_by_value(parameters, clip_val)
            return None
        return torch.nn.utils.clip_grad_norm_(parameters, clip_val, norm_type, error_if_nonfinite)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, module: nn.Module | None = None, optimizers: Sequence[Optimizer] = ()) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Args:
            module: the user's module. Use the module's parameter names as keys for values that are stored per
                parameter. If an Engine's checkpoint contains several modules, ``module`` has these modules as children,
                under their names in the checkpoint.
            optimizers: the optimizers of the module's parameters.
        """
        return {}

    def load_state_dict(
        self, state_dict: dict[str, Any], module: nn.Module | None = None, optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """Restore a result of :meth:`state_dict`. Called after the module and the optimizers were restored."""

    def teardown(self) -> None:
        """Free resources of this precision. Called when a run ends, also after an exception."""


def _to_default_dtype(leaf: Any) -> Any:
    return leaf.to(torch.get_default_dtype()) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


in_default_dtype: Callable[[Any], Any] = functools.partial(map_leaves, _to_default_dtype)
"""A function that returns its argument with every floating-point tensor converted to torch's default dtype."""


_MEANT = {
    "16-mixed": "fp16 float16 f16 half 16bit amp mixed fp16-mixed float16-mixed half-mixed",
    "16-true": "fp16-true float16-true half-true",
    "bf16-mixed": "bfloat16 bfloat bfloat16-mixed amp-bf16",
    "bf16-true": "bfloat16-true",
    "32-true": "fp32 float32 f32 float full single 32bit fp32-true float32-true",
    "64-true": "fp64 float64 f64 double 64bit fp64-true float64-true",
    "float8": "fp8 fp8-mixed float8-mixed f8 float8-e4m3fn float8-e5m2 torchao",
}
"""For each precision, its names in other libraries and in torch."""


def precision_meant(given: object) -> str | None:
    """Return drivetrain's name for the precision that torch or another library calls ``given``. Return ``None`` for an
    unknown name.
    """
    word = str(given).lower().removeprefix("torch.").replace("_", "-")
    return next((name for name, words in _MEANT.items() if word in words.split()), None)


PrecisionRegistry: Registry[Precision] = Registry("drivetrain.precision", "precision", "precision", by_file=False)
"""The precisions by name: drivetrain's own, the users', and those of installed packages."""

for _name in ("32-true", "32"):  # __init_subclass__ runs only for subclasses
    PrecisionRegistry.register(_name, Precision)


class Autocast(Precision):
    """Base of precisions whose forward passes run under ``torch.autocast``, in :attr:`computes_in`.

    Autocast's cache of cast weights is off. The cache could give a training step a copy of a weight that was cast under
    ``no_grad``. The weight would then get no gradient.
    """

    def convert_output(self, data: Any) -> Any:
        return in_default_dtype(data)

    def forward_context(self) -> AbstractContextManager[Any] | None:
        if self.computes_in is None:
            return None
        return torch.autocast(self.device_type, dtype=self.computes_in, cache_enabled=False)
