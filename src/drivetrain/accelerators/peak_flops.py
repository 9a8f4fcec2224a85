"""The largest number of operations per second that a device can reach."""

from __future__ import annotations

import torch

from drivetrain.base.rank_zero import rank_zero_warn

# The vendors' figures for the peaks of devices, in dense operations per second. Each key is a part of a device's name;
# the longest key that matches is used.
_T = 1e12
_PEAKS: dict[str, dict[str, float]] = {
    "b200": {"float32": 75 * _T, "tf32": 1100 * _T, "half": 2250 * _T},
    "h200": {"float64": 67 * _T, "float32": 67 * _T, "tf32": 494.7 * _T, "half": 989.4 * _T},
    "h100": {"float64": 67 * _T, "float32": 67 * _T, "tf32": 494.7 * _T, "half": 989.4 * _T},
    "h100 pcie": {"float64": 51 * _T, "float32": 51 * _T, "tf32": 378 * _T, "half": 756 * _T},
    "a100": {"float64": 19.5 * _T, "float32": 19.5 * _T, "tf32": 156 * _T, "half": 312 * _T},
    "a10": {"float32": 31.2 * _T, "tf32": 62.5 * _T, "half": 125 * _T},
    "a10g": {"float32": 31.52 * _T, "tf32": 35 * _T, "half": 70 * _T},
    "l4": {"float32": 30.3 * _T, "tf32": 60 * _T, "half": 121 * _T},
    "l40s": {"float32": 91.6 * _T, "tf32": 183 * _T, "half": 362 * _T},
    "v100": {"float64": 7.8 * _T, "float32": 15.7 * _T, "tf32": 15.7 * _T, "half": 125 * _T},
    "t4": {"float32": 8.1 * _T, "tf32": 8.1 * _T, "half": 65 * _T},
    "rtx 4090": {"float32": 82.6 * _T, "tf32": 82.6 * _T, "half": 165.2 * _T},
    "rtx 3090": {"float32": 35.6 * _T, "tf32": 35.6 * _T, "half": 71 * _T},
}


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the peak of ``device`` in operations per second. If the peak is not known, warn and return ``None``.

    Args:
        device: a CUDA device. For any other device, the result is ``None``.
        dtype: the dtype of most operations. For float32, ``torch.get_float32_matmul_precision()`` selects the peak of
            float32 or of TF32.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return peak_of(name, dtype)


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
    return None if found is None else int(found)
