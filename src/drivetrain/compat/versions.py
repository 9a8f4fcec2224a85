"""``utilities.imports``: flags that third parties read. Programs import them despite their private names."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from itertools import takewhile


def _version(distribution: str) -> tuple[int, ...]:
    """Return the leading numbers of the installed version; empty if the distribution is not installed."""
    try:
        text = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ()
    numbers = ("".join(takewhile(str.isdigit, part)) for part in text.split("+")[0].split("."))
    return tuple(map(int, takewhile(bool, numbers)))


_torch = _version("torch")
_torchmetrics = _version("torchmetrics")

_TORCH_GREATER_EQUAL_2_2 = _torch >= (2, 2)
_TORCH_GREATER_EQUAL_2_3 = _torch >= (2, 3)
_TORCH_GREATER_EQUAL_2_4 = _torch >= (2, 4)
_TORCH_GREATER_EQUAL_2_4_1 = _torch >= (2, 4, 1)
_TORCH_GREATER_EQUAL_2_5 = _torch >= (2, 5)
_TORCH_GREATER_EQUAL_2_6 = _torch >= (2, 6)
_TORCHMETRICS_GREATER_EQUAL_0_9_1 = _torchmetrics >= (0, 9, 1)
_TORCHMETRICS_GREATER_EQUAL_0_11 = _torchmetrics >= (0, 11)
_TORCHMETRICS_GREATER_EQUAL_1_0_0 = _torchmetrics >= (1, 0, 0)
_PYTHON_GREATER_EQUAL_3_11_0 = sys.version_info >= (3, 11)
_IS_WINDOWS = sys.platform == "win32"
_IS_INTERACTIVE = hasattr(sys, "ps1")
_NUMPY_AVAILABLE = importlib.util.find_spec("numpy") is not None
_RICH_AVAILABLE = importlib.util.find_spec("rich") is not None
_OMEGACONF_AVAILABLE = importlib.util.find_spec("omegaconf") is not None
_TORCHVISION_AVAILABLE = importlib.util.find_spec("torchvision") is not None
