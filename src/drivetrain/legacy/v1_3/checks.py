"""Callbacks in place of the flags ``track_grad_norm`` and ``terminate_on_nan`` of Lightning 1.3's Trainer."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.callback import Callback
from drivetrain.legacy.v1_3.helpers import grad_norm


class GradientNorms(Callback):
    """Logs the norm of each parameter's gradient, for the flag ``track_grad_norm``.

    Args:
        norm_type: the order of the norm, such as 2; ``inf`` for the largest absolute element.
    """

    def __init__(self, norm_type: float | str) -> None:
        self.norm_type = norm_type

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.log_dict(grad_norm(pl_module, self.norm_type))


class StopsOnNaN(Callback):
    """Raises an error when the loss or a parameter is not finite, for the flag ``terminate_on_nan``.

    Each check blocks until the device has computed the values.
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None and not torch.isfinite(loss).all():
            raise ValueError(f"The loss of batch {batch_idx} is {loss.item()}. Look for a division by zero.")
        for name, parameter in pl_module.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ValueError(
                    f"The parameter {name} is not finite after batch {batch_idx}. Lower the learning rate."
                )
