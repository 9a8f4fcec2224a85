"""List the parameters and the gradients of an optimizer, and multiply the gradients by a factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """Return all parameters in the optimizer's parameter groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Any) -> list[Tensor]:
    """Return the gradients of the optimizer's parameters, without those that are ``None``."""
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def rescale(optimizers: Optimizer | Sequence[Optimizer] | None, factor: float | Tensor) -> None:
    """Multiply the gradients of the parameters of one or more optimizers by ``factor``."""
    for optimizer in optimizers if isinstance(optimizers, Sequence) else [optimizers]:
        for gradient in [] if optimizer is None else gradients_of(optimizer):
            gradient.mul_(factor)
