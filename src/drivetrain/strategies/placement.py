"""Move a module to a device; tied weights stay tied."""

from __future__ import annotations

import torch
from torch import nn


def place(module: nn.Module, device: torch.device) -> nn.Module:
    """Return ``module`` on ``device``, its tied parameters still tied.

    Most devices keep parameter objects where they are. Some make new ones, and then every name gets a parameter of its
    own: two layers that shared a weight would silently train one each.
    """
    named = [(owner, name, parameter) for owner in module.modules() for name, parameter in owner._parameters.items()]
    to_device = module.to(device)
    module = module if to_device is None else to_device  # an override of ``to`` may return nothing
    moved: dict[int, nn.Parameter | None] = {}
    for owner, name, before in named:
        if before is not None and owner._parameters[name] is not before:
            owner._parameters[name] = moved.setdefault(id(before), owner._parameters[name])
    return module
