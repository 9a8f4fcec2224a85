"""Parameters in 32 bits, matrix work in 16."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from drivetrain.errors import NotSupportedError
from drivetrain.precision.precision import Precision


class MixedPrecision(Precision):
    """Autocast around the steps (``torch.autocast``).

    Args:
        precision: "bf16-mixed".
        device: the autocast device type; ``None`` takes the accelerator's own.

    The backward pass runs outside the context, as torch advises, and the cast cache is off: it would hand a weight
    that was cast under ``no_grad`` to a later step that needs its gradient (trap T21).
    """

    def __init__(self, precision: str = "bf16-mixed", device: str | None = None) -> None:
        if precision != "bf16-mixed":
            raise NotSupportedError(
                f"MixedPrecision({precision!r}) needs a gradient scaler, which this version does not have. "
                'Write precision="bf16-mixed".'
            )
        self.name = precision
        self.device = device

    def forward_context(self, device_type: str) -> AbstractContextManager[Any] | None:
        return torch.autocast(self.device or device_type, dtype=torch.bfloat16, cache_enabled=False)
