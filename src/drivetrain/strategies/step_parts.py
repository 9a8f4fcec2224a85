"""The objects that a loop passes to a strategy: the operations of a training step, and functions of the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.precision.precision import Precision

OwnStep = Callable[[Any, int, int, bool, int], "tuple[Any, int]"]
"""``step(batch, batch_idx, index_in_window, last, size)`` of a strategy that implements the complete step itself.

A window is the batches of one optimizer step. ``index_in_window`` counts the batches of a window from 0. ``last`` is
True for the last batch of a window. ``size`` is the expected number of batches in the window. The step returns two
values: the output of ``training_step``, which the hooks at the end of the batch get, and the number of optimizer steps.
"""


@dataclass(frozen=True)
class StepParts:
    """The operations of a training step, for a strategy that composes the step itself.

    With one batch per optimizer step, the Trainer runs these lines::

        parts.begin(size=1)
        output = parts.training_step(batch, batch_idx)
        loss = parts.loss_of(output, index=0, last=True)
        if loss is not None:
            parts.backward(loss)
            parts.before_step()
            steps = int(parts.optimizer_step())

    These operations call the hooks in :attr:`HOOKS`, in their usual order.

    Attributes:
        training_step: ``(batch, batch_idx)``: calls the module's ``training_step`` in the run's precision. If the
            module has a wrapper, the call goes through the wrapper. The batch may be a part of a loader's batch.
        begin: ``(size, optimizer)``: clears the optimizer's gradients. Must be called before the ``size`` backward
            passes for one optimizer step.
        loss_of: ``(output, index, last)``: returns the loss in the output of ``training_step``, multiplied by the share
            of the batch in the optimizer step (1/4 for one of four batches); ``None`` if the output has no loss.
            ``index`` counts the backward passes for this optimizer step from 0.
        backward: ``(loss)``: computes gradients. If the precision scales losses, the gradients are scaled.
        accumulating: a context for ``training_step`` and ``backward`` of each pass except the last pass before an
            optimizer step. In this context, gradients stay on this rank. The last pass, outside the context, exchanges
            all gradients. See :meth:`Step.accumulating`.
        before_step: ``(optimizer)``: unscales and weights the accumulated gradients, calls the hooks, and clips the
            gradients.
        optimizer_step: ``(optimizer)``: steps the optimizer, with the strategy's override of ``optimizer_step`` if
            there is an override. Returns whether the optimizer stepped, because a precision may skip a step.
        module, model: the user's module, and the wrapped module.
        optimizers: the optimizers of the run. Operations with an optimizer argument use the first optimizer by default.
        precision: the precision of the run.
        data: the group of ranks that see different samples.
    """

    HOOKS: ClassVar[frozenset[str]] = frozenset(
        {
            "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
            "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients",
        }
    )  # fmt: skip

    training_step: Callable[[Any, int], Any]
    begin: Callable[..., None]
    loss_of: Callable[[Any, int, bool], Tensor | None]
    backward: Callable[..., None]
    accumulating: Callable[[], AbstractContextManager[None]]
    before_step: Callable[..., None]
    optimizer_step: Callable[..., bool]
    module: nn.Module
    model: nn.Module
    optimizers: Sequence[Optimizer]
    precision: Precision
    data: Any


@dataclass
class Driver:
    """Functions of the running loop that the strategy's methods call. An Engine does not set these functions.

    Attributes:
        differentiate: ``(loss, *args, **kwargs)``: scales the loss, and calls the module's ``backward`` and the hooks
            before and after the backward pass.
        transfer: ``(batch, device, dataloader_idx)``: moves a batch with the transfer hooks of the module and the
            datamodule.
        steps: by name, the functions that run the module's steps.
        rebind: must be called after a method was replaced, so that the loop uses the new method.
        exchanges_always: whether every backward pass exchanges gradients. The default implementation of
            :meth:`Step.accumulating` sets this flag.
        window_factor: returns the factor for :meth:`remaining_factor`; ``None`` means 1.
    """

    differentiate: Callable[..., Any] | None = None
    transfer: Callable[[Any, torch.device, int], Any] | None = None
    steps: dict[str, Callable[..., Any]] = field(default_factory=dict)
    rebind: Callable[[], None] | None = None
    exchanges_always: bool = False
    window_factor: Callable[[], float | Tensor | None] | None = None

    def remaining_factor(self) -> float | Tensor:
        """Return a factor for the gradients of one optimizer step. The loop multiplies the gradients by this factor
        after the last backward pass and before clipping.

        The factor is 1 if every loss was divided by the final number of batches. The factor differs from 1 if the
        optimizer step gets fewer batches at the end of an epoch, or if losses have weights. The factor is equal on all
        ranks, and does not include the loss scale of a precision.
        """
        factor = None if self.window_factor is None else self.window_factor()
        return 1.0 if factor is None else factor


HOOKS_IN_A_STEP = StepParts.HOOKS | {"optimizer_step"}
"""The hooks that run inside a step. A strategy with its own implementation of the complete step may call only some of
these hooks.
"""
