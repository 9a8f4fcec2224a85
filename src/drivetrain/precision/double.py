"""Everything in float64."""

from __future__ import annotations

import torch

from drivetrain.base.registry import Registry
from drivetrain.precision.half import TruePrecision
from drivetrain.precision.precision import Precision


class DoublePrecision(TruePrecision):
    """float64 ("64-true") for parameters, buffers, inputs and new tensors.

    Complex tensors keep their dtype, as under ``Module.double()``; new ones are complex128, which belongs to float64 in
    torch.
    """

    @classmethod
    def register_precisions(cls, precision_registry: Registry[Precision]) -> None:
        for name in ("64-true", "64"):
            precision_registry.register(name, cls)

    def __init__(self) -> None:
        super().__init__("64-true", torch.float64)
