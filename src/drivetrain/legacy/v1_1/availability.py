"""Whether optional packages can be imported, by the names of the 1.1 generation."""

from __future__ import annotations

from drivetrain.legacy.v1_3.availability import _module_available

__all__ = [
    "APEX_AVAILABLE", "FAIRSCALE_AVAILABLE", "HOROVOD_AVAILABLE", "HYDRA_AVAILABLE", "NATIVE_AMP_AVAILABLE",
    "TPU_AVAILABLE", "XLA_AVAILABLE",
]  # fmt: skip

APEX_AVAILABLE = True  # torch's own automatic mixed precision computes in its place
NATIVE_AMP_AVAILABLE = True
HOROVOD_AVAILABLE = True  # without the package, torch.distributed exchanges
HYDRA_AVAILABLE = _module_available("hydra")
FAIRSCALE_AVAILABLE = False  # the plugins on top of it do not exist
TPU_AVAILABLE = XLA_AVAILABLE = _module_available("torch_xla")
