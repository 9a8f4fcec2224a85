"""The vendor's library that the documents tell the reader to imagine, ``import xpulib``. Its two devices are the host,
so that everything runs on them; torch itself has no device of theirs.
"""

from __future__ import annotations

import torch


def available_devices() -> int:
    return 2


def is_available() -> bool:
    return True


def device(index: int) -> torch.device:
    return torch.device("cpu", index)
