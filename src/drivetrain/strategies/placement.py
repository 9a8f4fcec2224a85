"""Move a module or an optimizer's state to a device. Tied weights of the module stay tied."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.base.torch_private import own_parameters
from drivetrain.base.tree import map_leaves


def place(module: nn.Module, device: torch.device) -> nn.Module:
    """Return ``module`` on ``device``. Tied parameters stay tied.

    On most devices parameter objects stay the same. On some devices, torch creates a new object for every name of a
    parameter. Two layers with a shared weight would then silently train separate copies.
    """
    named = [(owner, name, each) for owner in module.modules() for name, each in own_parameters(owner).items()]
    to_device = module.to(device)
    module = module if to_device is None else to_device  # an override of ``to`` may return nothing
    moved: dict[int, nn.Parameter | None] = {}
    for owner, name, before in named:
        if before is not None and own_parameters(owner)[name] is not before:
            own_parameters(owner)[name] = moved.setdefault(id(before), own_parameters(owner)[name])
    return module


def optimizer_to(optimizer: Optimizer, device: torch.device) -> None:
    """Move an optimizer's state to ``device``."""
    for state in optimizer.state.values():
        for key, value in state.items():
            # LBFGS has lists of tensors
            state[key] = map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)
