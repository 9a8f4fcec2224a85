"""The largest number of operations per second that a device can reach."""

from __future__ import annotations

import torch

from drivetrain.base.ini import tables
from drivetrain.base.rank_zero import rank_zero_warn

_PEAKS = tables(__file__, "peak_flops.ini")


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the peak of ``device`` in operations per second. If the peak is not known, warn and return ``None``.

    Args:
        device: a CUDA device. For any other device, the result is ``None``.
        dtype: the dtype of most operations. For float32, ``torch.get_float32_matmul_precision()`` selects the peak of
            float32 or of TF32.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype | str) -> int | None:
    """Return the peak of the CUDA device with this ``name``, or ``None`` if the peak is not known."""
    words = name.lower().replace("-", " ").split()
    text = f" {' '.join(words)} "
    known = [each for each in _PEAKS if f" {each} " in text or (each == "h100 pcie" and {"h100", "pcie"} <= set(words))]
    kind = str(dtype).removeprefix("torch.")
    kind = "half" if kind in ("float16", "bfloat16") else kind
    if kind == "float32" and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    found = _PEAKS[max(known, key=len)].get(kind) if known else None
    if found is None:
        rank_zero_warn(
            f"The peak of {name} in {dtype} is not known, so the share of it (mfu) is left out. Pass available_flops."
        )
    return None if found is None else int(float(found) * 1e12)
