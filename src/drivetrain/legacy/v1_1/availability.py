"""Flags for importable optional packages, with the names of the 1.1 generation."""

from __future__ import annotations

from drivetrain.legacy.v1_3.availability import _module_available

__all__ = [
    "APEX_AVAILABLE", "FAIRSCALE_AVAILABLE", "HOROVOD_AVAILABLE", "HYDRA_AVAILABLE", "NATIVE_AMP_AVAILABLE",
    "TPU_AVAILABLE", "XLA_AVAILABLE",
]  # fmt: skip

APEX_AVAILABLE = True  # torch's own automatic mixed precision replaces Apex
NATIVE_AMP_AVAILABLE = True
HOROVOD_AVAILABLE = True  # without the package, torch.distributed is used
HYDRA_AVAILABLE = _module_available("hydra")
FAIRSCALE_AVAILABLE = False  # there are no plugins for this package
TPU_AVAILABLE = XLA_AVAILABLE = _module_available("torch_xla")
