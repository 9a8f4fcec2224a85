"""The file format of checkpoints and of results from started processes."""

from __future__ import annotations

import pickle
import types
from typing import IO, Any

import torch


def write(value: Any, stream: IO[bytes], protocol: int = 2) -> None:
    """Write ``value`` as ``torch.save`` does, for ``torch.load``: a zip container with a checksum for each tensor.

    Each tensor is written straight from its memory, and from a device by way of the host, one after the other. Views of
    one memory stay views of one memory; those of another type, which torch refuses, are written as copies.

    Args:
        value: whatever can be pickled.
        stream: where to; a file that is open for writing.
        protocol: of pickle. torch's restricted reader takes 2.

    Raises:
        RuntimeError, OSError: the stream takes no more.
        pickle.PickleError, AttributeError, TypeError: something in it cannot be pickled.
    """
    torch.save(value, stream, _PICKLE, protocol)


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._types: dict[int, torch.dtype] = {}  # of the memory at each address

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        try:
            address = obj.untyped_storage().data_ptr()
        except RuntimeError:  # sparse tensors and those of some devices have no memory of one kind
            return NotImplemented
        if address and self._types.setdefault(address, obj.dtype) != obj.dtype:
            return obj.detach().clone().__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return NotImplemented


_PICKLE = types.SimpleNamespace(__name__=__name__, Pickler=_Pickler)
