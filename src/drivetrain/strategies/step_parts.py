"""What a loop passes to a strategy: the operations from which the strategy can compose its own step, and functions of
the loop.
"""

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

A window is the batches of one optimizer step. ``index_in_window`` counts these batches from 0, ``last`` is true for the
last one, and ``size`` is their expected number. The step returns the output of ``training_step``, for the hooks at the
end of the batch, and the number of optimizer steps.
"""


@dataclass(frozen=True)
class StepParts:
    """The operations of a training step, for a strategy that composes the step itself.

    With one batch per optimizer step, the Trainer does this::

        parts.begin(size=1)
        output = parts.training_step(batch, batch_idx)
        loss = parts.loss_of(output, index=0, last=True)
        if loss is not None:
            parts.backward(loss)
            parts.before_step()
            steps = int(parts.optimizer_step())

    These operations call the hooks in :attr:`HOOKS`, in their usual order.

    Attributes:
        training_step: ``(batch, batch_idx)``: calls the module's ``training_step`` in the run's precision, through the
            wrapper around the module if there is one. The batch may be a part of a loader's batch.
        begin: ``(size, optimizer)``: starts the ``size`` backward passes for one optimizer step; clears the optimizer's
            gradients.
        loss_of: ``(output, index, last)``: returns the loss in the output of ``training_step``, divided or weighted by
            its share in the optimizer step; ``None`` if the output has no loss. ``index`` counts the backward passes
            for this optimizer step from 0.
        backward: ``(loss)``: computes gradients, which are scaled if the precision scales losses.
        accumulating: a context around ``training_step`` and ``backward`` of each pass but the last one before an
            optimizer step. The context keeps gradients on this rank; the last pass, outside of it, exchanges all of
            them. See :meth:`Step.accumulating`.
        before_step: ``(optimizer)``: unscales and weights the accumulated gradients, calls the hooks, and clips the
            gradients.
        optimizer_step: ``(optimizer)``: steps the optimizer, by the strategy's ``optimizer_step`` if it is overridden;
            returns whether the optimizer stepped, because a precision may skip a step.
        module, model: the user's module, and the strategy's wrapped form of it.
        optimizers: the optimizers of the run; operations with an optimizer argument use the first by default.
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
    """Functions of the running loop that the strategy's methods call; an Engine does not set them.

    Attributes:
        differentiate: ``(loss, *args, **kwargs)``: scales the loss, calls the hooks around the backward pass and the
            module's ``backward``.
        transfer: ``(batch, device, dataloader_idx)``: moves a batch with the transfer hooks of the module and the
            datamodule.
        steps: the module's steps by name, as the loop has bound them.
        rebind: binds the step again, after a method was replaced.
        exchanges_always: whether the default :meth:`Step.accumulating` was called, so that every backward pass
            exchanges gradients.
        window_factor: returns the factor of :meth:`remaining_factor`, or ``None`` for 1.
    """

    differentiate: Callable[..., Any] | None = None
    transfer: Callable[[Any, torch.device, int], Any] | None = None
    steps: dict[str, Callable[..., Any]] = field(default_factory=dict)
    rebind: Callable[[], None] | None = None
    exchanges_always: bool = False
    window_factor: Callable[[], float | Tensor | None] | None = None

    def remaining_factor(self) -> float | Tensor:
        """Return the factor by which the loop multiplies the gradients between the last backward pass for an optimizer
        step and clipping.

        The factor is 1 if every loss was divided by the final number of batches. The factor differs from 1 if the
        optimizer step gets fewer batches at the end of an epoch, or if losses have weights. The factor is equal on all
        ranks, and does not include the loss scale of a precision.
        """
        factor = None if self.window_factor is None else self.window_factor()
        return 1.0 if factor is None else factor


HOOKS_IN_A_STEP = StepParts.HOOKS | {"optimizer_step"}
"""The hooks that run inside a step; a strategy that implements the complete step itself decides which of
them it calls.
"""
