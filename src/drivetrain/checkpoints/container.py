"""The file format of checkpoints and of results from started processes."""

from __future__ import annotations

import pickle
import types
from typing import IO, Any

import torch


def write(value: Any, stream: IO[bytes], protocol: int = 2) -> None:
    """Write ``value`` for ``torch.load``, as ``torch.save`` does: a zip container with a checksum for each tensor.

    Each tensor is written directly from its memory, one after the other; tensors on a device are copied to the host
    first. Views of one storage stay views; views with another dtype, which ``torch.save`` refuses, are written as
    copies.

    Args:
        value: any picklable value.
        stream: a file object open for writing.
        protocol: the pickle protocol. torch's restricted reader accepts 2.

    Raises:
        RuntimeError, OSError: the stream cannot be written.
        pickle.PickleError, AttributeError, TypeError: a value cannot be pickled.
    """
    torch.save(value, stream, _PICKLE, protocol)


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._types: dict[int, torch.dtype] = {}  # the dtype of the storage at each address

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        try:
            address = obj.untyped_storage().data_ptr()
        except RuntimeError:  # sparse tensors and tensors on some devices have no single storage
            return NotImplemented
        if address and self._types.setdefault(address, obj.dtype) != obj.dtype:
            return obj.detach().clone().__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return NotImplemented


_PICKLE = types.SimpleNamespace(__name__=__name__, Pickler=_Pickler)
