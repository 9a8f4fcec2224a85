"""Lightning's ``utilities.imports``: flags that other libraries import, most of them with private names."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from itertools import takewhile


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as 1, 2 and 0 for "1.2.0rc1"."""
    numbers = ("".join(takewhile(str.isdigit, part)) for part in version.split("+")[0].split("."))
    return tuple(map(int, takewhile(bool, numbers)))


def _version(distribution: str) -> tuple[int, ...]:
    """Return the leading numbers of the installed version; ``()`` if the distribution is not installed."""
    try:
        return numbers_of(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return ()


_torchmetrics = _version("torchmetrics")

_TORCH_GREATER_EQUAL_2_2 = _TORCH_GREATER_EQUAL_2_3 = _TORCH_GREATER_EQUAL_2_4 = True  # drivetrain needs torch 2.9
_TORCH_GREATER_EQUAL_2_4_1 = _TORCH_GREATER_EQUAL_2_5 = _TORCH_GREATER_EQUAL_2_6 = True
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
