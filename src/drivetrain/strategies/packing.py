"""Objects that one rank sends to others, as bytes.

What holds no tensor is pickled. The rest is written by torch.save, and loading it takes half a millisecond: too long
where each of 1,024 ranks loads an object of every other.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.strategies.peers import as_bytes


class _HasTensorError(Exception):
    pass


def _refuse(obj: Any) -> Any:
    raise _HasTensorError


# Of a subclass of Tensor, a storage is pickled.
_TENSORS = dict.fromkeys((Tensor, nn.Parameter, nn.Buffer, torch.UntypedStorage, torch.TypedStorage), _refuse)


def dumped(obj: Any) -> tuple[bytes, str | None]:
    """Return ``obj`` as bytes, or the reason why it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        try:
            pickler = pickle.Pickler(buffer, protocol=4)
            pickler.dispatch_table = {**copyreg.dispatch_table, **_TENSORS}
            pickler.dump(obj)
        except _HasTensorError:
            torch.save(obj, buffer := io.BytesIO())
    except Exception as error:  # a class's __reduce__ may raise anything
        return b"", f"what cannot be pickled: {type(error).__name__}: {error}"
    return buffer.getvalue(), None


def loaded(data: Tensor, device: torch.device | None) -> Any:
    """Return an object of another rank of this job; its tensors on an accelerator are moved to this rank's device."""

    def here(storage: Any, location: str) -> Any:
        target = nearest(location.partition(":")[0], device)
        return storage if target.type in ("cpu", "meta") else storage.to(device=target)

    packed = as_bytes(data)
    if packed.startswith(b"\x80"):
        return pickle.loads(packed)  # torch.save begins otherwise
    return torch.load(io.BytesIO(packed), map_location=here, weights_only=False)


def nearest(kind: str, device: torch.device | None) -> torch.device:
    """Return this rank's device of this ``kind``."""
    return device if device is not None and device.type == kind else torch.device(kind)
