"""torch's gradient scaler in a DeepSpeed engine: the engine unscales gradients and finds non-finite ones.

With "16-mixed" the parameters are float32, and DeepSpeed does not scale the loss for float32 parameters. The scaler
belongs to the precision, so checkpoints contain its state as with any other strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from drivetrain.precision.mixed import torch_scaler

_LEFT_TO_THE_ENGINE = ("scale", "unscale", "unscale_gradients")


class EngineScaler:
    """The interface that a ZeRO optimizer of DeepSpeed expects of its ``loss_scaler``.

    Args:
        scaler: the scaler of the precision.
    """

    dynamic = True

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler: Any = scaler

    @property
    def cur_scale(self) -> float:
        """The factor by which the losses were multiplied."""
        return float(self._scaler.get_scale())

    loss_scale = cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate in place of ``loss``."""
        return self._scaler.scale(loss)

    def update_scale(self, overflow: bool) -> None:
        """Change the scale after a step, as torch's scaler does."""
        own = self._scaler
        if own._scale is not None and own.is_enabled():
            found = torch.full((), float(overflow), device=own._scale.device)
            options = own.get_growth_factor(), own.get_backoff_factor(), own.get_growth_interval()
            torch._amp_update_scale_(own._scale, own._growth_tracker, found, *options)


def hand_over(precision: Any, zero: Any) -> None:
    """Let the engine's optimizer use the scaler of ``precision``; the precision then neither scales nor unscales."""
    if (scaler := torch_scaler(precision)) is None:
        return
    zero.loss_scaler, zero.dynamic_loss_scale = EngineScaler(scaler), True
    vars(precision).update(dict.fromkeys(_LEFT_TO_THE_ENGINE, _as_it_is))


def take_back(precision: Any) -> None:
    """Undo :func:`hand_over`."""
    for name in _LEFT_TO_THE_ENGINE:
        vars(precision).pop(name, None)


def _as_it_is(value: Any) -> Any:
    return value
