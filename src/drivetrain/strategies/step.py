"""Step: the methods with which a strategy changes parts of a training step, or replaces the complete step.

In a step, the loop calls only the methods that the strategy overrides. In place of any other method, the loop runs the
default operation directly. A strategy can override a method in its class or on the instance. An override that is set
during a run takes effect at the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.compiled import compiled_method
from drivetrain.base.introspect import defined_by_user, overrides
from drivetrain.base.lazy import on_first_use
from drivetrain.base.restoring import WrongForm
from drivetrain.base.tree import move, rescale
from drivetrain.precision.familiar import differentiate, end_step
from drivetrain.precision.precision import ClipAlgorithm, Precision
from drivetrain.strategies.facts import Shared
from drivetrain.strategies.redirection import redirected
from drivetrain.strategies.step_parts import OwnStep, StepParts

if TYPE_CHECKING:
    from drivetrain.strategies.strategy import Strategy

with on_first_use:
    from drivetrain.strategies import sharded_state as sharded


class Step(Shared):
    """The methods of a step. An override can call the default implementation with ``super()``.

    Ranks must exchange gradients during the backward pass or directly afterwards. Gradients are unscaled, weighted and
    clipped after this exchange. A strategy that exchanges gradients itself does so in :meth:`backward`, except inside
    the context :meth:`accumulating`.

    Attributes:
        driver: the functions of the running loop that the strategy calls, and a flag for the loop.
    """

    def bind(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the module's step ``name`` through the wrapper around the module."""
        method = compiled_method(self.lightning_module, name)
        assert self.model is not None  # setup() came first
        return redirected(method, self.lightning_module, self.model, self.facts.calls_through_forward)

    def bind_step(self, parts: StepParts) -> OwnStep | None:
        """Return the strategy's own training step, or ``None`` to use the loop's step. Not called in manual
        optimization.

        Called when the run is set up, at the start of each epoch, and after a part of the run was replaced. A strategy
        that returns a step must list in ``facts.honoured_hooks`` the hooks that this step calls.
        """
        return None

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move the batch to ``device`` (``None``: the root device) with the transfer hooks of module and datamodule."""
        device = self.root_device if device is None else device
        if self.driver.transfer is None:
            return move(batch, device)
        return self.driver.transfer(batch, device, dataloader_idx)

    def repeat_batch(self, repeats: bool) -> None:
        """Prepare for a batch that this rank repeats because other ranks have more batches. Called with True before
        this batch, and with False afterwards. A repeated batch must not change the model's state.
        """

    # ---- gradients -----------------------------------------------------------------------------------------------

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients: scale the loss, and call the module's ``backward`` and the hooks before and after it.

        Args:
            closure_loss: the unscaled loss.
            optimizer: the optimizer of these gradients; ``None`` if the optimizer is unknown.
            args, kwargs: arguments of ``Tensor.backward``.

        Returns: ``closure_loss``.
        """
        precision, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        compute = self.driver.differentiate or self._differentiate
        differentiate(precision, closure_loss, module, optimizer, compute, *args, **kwargs)
        self.post_backward(closure_loss)
        return closure_loss

    def _differentiate(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        precision = self.precision_plugin
        precision.backward(precision.scale(loss) if precision.scales_loss else loss, *args, **kwargs)

    def manual_backward_context(self, loss: Tensor) -> AbstractContextManager[Any]:
        """Context around a backward pass that user code starts with ``manual_backward``."""
        return nullcontext()

    def accumulating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context in which backward passes only accumulate gradients in this process. A later pass outside the context
        exchanges these gradients.

        Do not override this method in a strategy that exchanges gradients in every backward pass.
        """
        self.driver.exchanges_always = True
        return nullcontext()

    def open_gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients so far for the next optimizer step, by parameter name. The gradients are not
        copied.

        Checkpoints and :meth:`rescale_gradients` use this method. Override this method if :meth:`accumulating` does not
        keep gradients in ``parameter.grad``.
        """
        named = ((name, parameter.grad) for name, parameter in self.lightning_module.named_parameters())
        return {name: sharded.local_shard(gradient) for name, gradient in named if gradient is not None}

    def load_open_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Restore a result of :meth:`open_gradients`. The gradients may also be complete. This rank then keeps only its
        shards.

        Raises:
            WrongForm: the shape of a gradient is neither that of the parameter nor that of this rank's shard.
        """
        for name, parameter in self.lightning_module.named_parameters():
            shape = sharded.local_shard(parameter).shape
            if name in gradients and shape != gradients[name].shape == parameter.shape:
                parameter.grad = sharded.shard_like(gradients[name].to(sharded.local_shard(parameter)), parameter)
                continue
            if name in gradients and gradients[name].shape != shape:
                found = tuple(gradients[name].shape)
                raise WrongForm(f"[{name!r}]", f"is a gradient of shape {found}, and {tuple(shape)} is expected")
            parameter.grad = sharded.from_local_shard(gradients[name], parameter) if name in gradients else None

    def rescale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None, factor: float | Tensor) -> None:
        """Multiply the current gradients by ``factor``.

        Called if losses have weights, or if an optimizer step gets fewer batches than expected. Override this method if
        :meth:`open_gradients` returns copies, because multiplying copies does not change the gradients.

        Args:
            optimizer: one optimizer or several. The gradients of these optimizers' parameters are multiplied.
            factor: a number, or a tensor with one element.
        """
        if overrides(self, "open_gradients", Step):
            for gradient in self.open_gradients().values():
                gradient.mul_(factor)
            return
        rescale(optimizer, factor)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float,
        algorithm: ClipAlgorithm = "norm",
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip the final gradients of this optimizer's parameters; see :meth:`Precision.clip_gradients`.

        Returns: the norm before clipping; ``None`` if no norm was computed.
        """
        if algorithm == "value":
            return self.precision_plugin.clip_gradients(optimizer, clip_val, "value")
        return self.precision_plugin.clip_gradients(optimizer, clip_val, "norm", norm_type, error_if_nonfinite)

    # ---- the optimizer -------------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step ``optimizer`` in the run's precision.

        Args:
            optimizer: the user's optimizer.
            closure: a function that computes the loss and the gradients, unscales and clips the gradients, and returns
                the loss. ``None``: the gradients are already computed.
            model: the model whose parameters are stepped.
            kwargs: arguments of ``optimizer.step``.

        Returns: the result of ``closure``.
        """
        precision = self.precision_plugin
        loss = precision.optimizer_step(optimizer, model, closure, **kwargs)
        end_step(precision, optimizer)
        return loss


def steps_itself(strategy: Strategy) -> bool:
    """Return whether the strategy or its precision overrides ``optimizer_step``."""
    precision = strategy.precision_plugin
    return overrides(strategy, "optimizer_step", Step) or defined_by_user(precision, "optimizer_step")


def differentiates_itself(strategy: Strategy) -> bool:
    """Return whether the strategy or its precision overrides the backward pass."""
    precision = strategy.precision_plugin
    if overrides(strategy, "backward", Step) or defined_by_user(precision, "backward"):
        return True
    return any(overrides(precision, name, Precision) for name in ("pre_backward", "post_backward"))
