"""Everything in 64 bits."""

from __future__ import annotations

import torch

from drivetrain.precision.half import TruePrecision


class DoublePrecision(TruePrecision):
    """64-bit floats ("64-true") and 128-bit complex numbers, for parameters, buffers, inputs and new tensors."""

    def __init__(self) -> None:
        super().__init__("64-true", torch.float64, torch.complex128)
