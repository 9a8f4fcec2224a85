"""Lightning's ``utilities.grads``, ``utilities.parameter_tying`` and ``utilities.measure_flops``: functions that
inspect a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient and the total norm, as a dictionary for ``self.log_dict``.

    Args:
        module: the module; parameters without a gradient are left out.
        norm_type: the order of the norm, a positive number or "inf".
        group_separator: the separator in a key, such as "/" in "grad_2.0_norm/layer.weight".

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    kind = float(norm_type)
    if kind <= 0:
        raise ValueError(f"grad_norm(norm_type={norm_type}): there is no such norm. Write a number above 0, or 'inf'.")
    norms = {
        f"grad_{kind}_norm{group_separator}{name}": parameter.grad.detach().norm(kind)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return {**norms, f"grad_{kind}_norm_total": torch.stack(list(norms.values())).norm(kind)} if norms else {}


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return a list for each parameter that has several names: these names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def set_shared_parameters(module: nn.Module, shared_params: Sequence[Sequence[str]]) -> nn.Module:
    """Tie parameters again. For each list of names, assign the parameter with the first name to all names."""
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
    return module


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None
) -> int:
    """Return the number of floating-point operations of a forward pass. With ``loss_fn``, add those of the backward
    pass.

    Args:
        model: the model. Its mode and its gradients are restored afterwards.
        forward_fn: runs the model once.
        loss_fn: computes a loss from the result of ``forward_fn``.
    """
    counter = FlopCounterMode(display=False)
    grads = [parameter.grad for parameter in model.parameters()]
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            for parameter in model.parameters():
                parameter.grad = None  # because the backward pass would add to the old gradient
            torch.autograd.backward(loss_fn(output))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    return counter.get_total_flops()
