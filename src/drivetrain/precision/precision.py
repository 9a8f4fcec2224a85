"""The contract of a numeric precision; the base class is plain 32-bit floats."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ClipAlgorithm = Literal["norm", "value"]


class Precision:
    """Full 32-bit precision ("32-true"): nothing is converted, nothing is scaled."""

    name: str = "32-true"
    scales_loss: bool = False
    """Whether backward needs a scaled loss: only then are ``scale``, ``unscale`` and ``step`` called (trap T21)."""

    stepped: bool = True
    """Whether the last ``step`` really stepped."""

    _device_type: str = "cpu"

    # ---- numbers -------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module with its parameters in this precision; called once, before the optimizers exist."""
        return module

    def convert_input(self, batch: Any) -> Any:
        """A batch with its floating-point tensors in this precision; called only where a subclass overrides it."""
        return batch

    def forward_context(self, device_type: str) -> AbstractContextManager[Any] | None:
        """A reusable context for ``training_step`` and the evaluation steps; ``None`` where none is needed.

        ``None`` and not an empty context: entering even an empty one costs in every step.
        """
        return None

    def init_context(self) -> AbstractContextManager[Any] | None:
        """A reusable context for the building of layers, in which new parameters have this precision, or ``None``."""
        return None

    def bind_device(self, device_type: str) -> None:
        """Know the type of the device that steps run on, for the contexts that follow."""
        self._device_type = device_type

    def train_step_context(self) -> AbstractContextManager[Any]:
        """A new context for one ``training_step``; the three others are the same."""
        return self.forward_context(self._device_type) or nullcontext()

    val_step_context = test_step_context = predict_step_context = train_step_context

    # ---- gradients -----------------------------------------------------------------------------------------------

    def bind(self, optimizers: Sequence[Optimizer]) -> None:
        """A run begins, and these are all its optimizers."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``.

        A strategy's own ``backward`` may call it as the field's do, ``(loss, module, optimizer, ...)``: then the hooks
        around it and the scaling are part of it.
        """
        if args and isinstance(args[0], nn.Module):
            module: Any = args[0]
            module.trainer.strategy.driver.differentiate(loss, *args[2:], **kwargs)
        else:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def pre_backward(self, tensor: Tensor, module: nn.Module) -> Tensor:
        """``tensor``: what belongs before a backward pass, :meth:`backward` does when it is given the module."""
        return tensor

    def post_backward(self, tensor: Tensor, module: nn.Module) -> Tensor:
        """``tensor``, likewise."""
        return tensor

    def optimizer_step(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer`` in this precision: see :meth:`Stepping.optimizer_step`. Returns what ``closure`` does."""
        if not self.scales_loss:
            return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)
        loss = None
        if closure is not None:  # before the step and not inside: the scaler looks at the gradients first (trap T21)
            with torch.enable_grad():
                loss = closure()
        self.step(optimizer, **kwargs)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate in place of ``loss``."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Give this optimizer's parameters their true gradients; a second call before its step does nothing."""

    def step(self, optimizer: Optimizer, **kwargs: Any) -> bool:
        """Step the optimizer; returns whether it really stepped (trap T16)."""
        optimizer.step(**kwargs)
        return True

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float,
        algorithm: ClipAlgorithm = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip the gradients of this optimizer's parameters only, unscaled (trap T22).

        Args:
            optimizer: whose parameters; those without a gradient are skipped.
            clip_val: the largest norm of all of them together ("norm"), or of each element's absolute value ("value").
                Not positive: nothing happens.
            algorithm: "norm" or "value".
            norm_type: which norm; ``inf`` is the largest element.
            error_if_nonfinite: raise RuntimeError if the norm is no number; that reads the device.

        Returns:
            The norm before clipping, on the device; ``None`` where none was computed.
        """
        if clip_val <= 0:
            return None
        if self.scales_loss:
            self.unscale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
            return None
        return torch.nn.utils.clip_grad_norm_(parameters, clip_val, norm_type, error_if_nonfinite)

    # ---- state ---------------------------------------------------------------------------------------------------

    @property
    def scaler(self) -> Any:
        """The gradient scaler, where there is one."""
        return None

    def take_up_gradients(self, device: torch.device) -> None:
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
