"""Flags that tell whether optional packages can be imported. The names are from Lightning 1.3 and 1.1."""

from __future__ import annotations

from importlib.util import find_spec


def _module_available(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except (AttributeError, ModuleNotFoundError):
        return False


_BOLTS_AVAILABLE = _module_available("pl_bolts")
_FAIRSCALE_PIPE_AVAILABLE = False  # drivetrain has no plugin for this package
_OMEGACONF_AVAILABLE = _module_available("omegaconf")
_TORCHTEXT_AVAILABLE = _module_available("torchtext")
_TORCHVISION_AVAILABLE = _module_available("torchvision")

# ---- of the 1.1 generation -------------------------------------------------------------------------------------------

APEX_AVAILABLE = True  # torch's own automatic mixed precision replaces Apex
NATIVE_AMP_AVAILABLE = True
HOROVOD_AVAILABLE = True  # without the package, torch.distributed is used
HYDRA_AVAILABLE = _module_available("hydra")
FAIRSCALE_AVAILABLE = False  # drivetrain has no plugins for this package
TPU_AVAILABLE = XLA_AVAILABLE = _module_available("torch_xla")
