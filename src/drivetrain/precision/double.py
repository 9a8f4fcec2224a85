"""Everything in 64 bits."""

from __future__ import annotations

import torch

from drivetrain.base.registry import Registry
from drivetrain.precision.half import TruePrecision
from drivetrain.precision.precision import Precision


class DoublePrecision(TruePrecision):
    """64-bit floats ("64-true"), for parameters, buffers, inputs and new tensors.

    Complex tensors keep their type, as under ``Module.double()``; new ones are complex128, torch's type beside float64.
    """

    @classmethod
    def register_precisions(cls, precision_registry: Registry[Precision]) -> None:
        for name in ("64-true", "64"):
            precision_registry.register(name, cls)

    def __init__(self) -> None:
        super().__init__("64-true", torch.float64)
