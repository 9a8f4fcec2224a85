"""The precision on XLA devices: all floating-point tensors have one dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from drivetrain.errors import check_known
from drivetrain.precision.half import TruePrecision

_DTYPES = {"32-true": torch.float32, "16-true": torch.float16, "bf16-true": torch.bfloat16}


class XLAPrecision(TruePrecision):
    """Parameters, buffers, inputs and new tensors in one dtype on an XLA device.

    Lightning has a class of this name. ``Trainer(precision="bf16-true")`` has the same effect. The loss is not scaled.
    The environment variables ``XLA_USE_BF16`` and ``XLA_USE_F16``, which torch_xla has removed, are not needed.

    Args:
        precision: "32-true", "16-true" or "bf16-true".

    Raises:
        ConfigurationError: the precision is unknown.
    """

    def __init__(self, precision: str = "32-true") -> None:
        check_known("XLAPrecision", precision, "precision on XLA devices", _DTYPES)
        super().__init__(precision, _DTYPES[precision])

    def forward_context(self) -> AbstractContextManager[None] | None:
        return None if self.name == "32-true" else super().forward_context()
