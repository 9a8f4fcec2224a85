"""Everything in float64."""

from __future__ import annotations

import torch

from drivetrain.precision.half import TruePrecision


class DoublePrecision(TruePrecision):
    """float64 ("64-true") for parameters, buffers, inputs and new tensors.

    Complex tensors keep their dtype, as with ``Module.double()``. New complex tensors are complex128, torch's complex
    type with float64 parts.
    """

    _names = ("64-true", "64")

    def __init__(self) -> None:
        super().__init__("64-true", torch.float64)
