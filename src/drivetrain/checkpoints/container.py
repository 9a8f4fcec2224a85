"""Write tensors and other values in the format of ``torch.save``."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import OrderedDict
from typing import IO, Any

import torch

from drivetrain.base.memory import contents_of
from drivetrain.base.torch_private import hooks_of, name_of_storage, storage_inside, storage_key
from drivetrain.checkpoints.unread import UnreadTensor
from drivetrain.checkpoints.writer_process import Summed, write_zip


def write(value: Any, stream: IO[bytes], protocol: int = 2) -> None:
    """Write ``value`` as ``torch.save`` does: in a zip container with a checksum for each tensor. A tensor on the host
    is written directly from its memory. A tensor on a device is first copied to the host. Tensors that share a storage
    also share it after loading. But a view with another dtype is written as a copy, because ``torch.save`` refuses it.

    Args:
        value: any picklable value.
        stream: a file object open for writing.
        protocol: the pickle protocol. ``torch.load(weights_only=True)`` accepts only 2.

    Raises:
        RuntimeError, OSError: the stream cannot be written.
        pickle.PickleError, AttributeError, TypeError: a value cannot be pickled.
    """
    torch.save(value, stream, _PICKLE, protocol)


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._types: dict[int, torch.dtype] = {}  # the dtype of the first view of each storage, by address

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


# ---- values with tensors that are not read yet -----------------------------------------------------------------------


def write_unread(value: Any, stream: IO[bytes]) -> None:
    """Write ``value`` as :func:`write` does, but read each :class:`UnreadTensor` only when the tensor is written. So
    memory holds only one of these tensors at a time. ``torch.save`` would first read all tensors.

    Raises:
        CheckpointError: an unread tensor's file is missing or damaged.
        RuntimeError, OSError, pickle.PickleError, AttributeError, TypeError: as in :func:`write`.
    """
    write_zip(Summed(stream), contents_of(records_of(value)))


def records_of(value: Any) -> list[tuple[str, Any]]:
    """Return the name and the content of each record of a container. A content is bytes, a storage or an unread tensor.

    Raises:
        pickle.PickleError, AttributeError, TypeError: a value cannot be pickled.
    """
    structure = io.BytesIO()
    pickler = _UnreadPickler(structure, 2)
    pickler.dump(value)
    plain = {"data.pkl": structure.getvalue(), "byteorder": sys.byteorder.encode(), "version": b"3\n"}
    records = {**plain, **{f"data/{key}": source for key, source in enumerate(pickler.sources)}}
    return [(f"archive/{name}", record) for name, record in records.items()]


_NEVER = frozenset({int, float, bool, str, tuple, list, dict, type(None)})  # types that are not storages


class _Pending:
    """The content of a record (a storage or an unread tensor), and a typed storage of the same dtype."""

    def __init__(self, source: Any, kind: Any) -> None:
        self.source, self.kind = source, kind


class _UnreadPickler(_Pickler):
    """Pickles values, and lists the contents of the tensors' records in ``sources``.

    This class pickles plain tensors three times as fast as torch. The speed matters even in a background thread,
    because the training thread cannot run Python during the pickling.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sources: list[Any] = []
        self._keys: dict[int, str] = {}
        self._forms: dict[torch.dtype, Any] = {}  # the result of ``Tensor.__reduce_ex__`` for each dtype

    def reducer_override(self, obj: Any) -> Any:
        source = obj
        if not isinstance(obj, UnreadTensor):
            reduced = super().reducer_override(obj)
            if reduced is not NotImplemented or not _is_plain(obj):
                return reduced
            source = obj.untyped_storage()
        if obj.dtype not in self._forms:
            self._forms[obj.dtype] = torch.empty((), dtype=obj.dtype).__reduce_ex__(2)  # type: ignore[no-untyped-call]
        rebuild, (kind, _, _, _, needs_grad, _, *rest) = self._forms[obj.dtype]
        offset = 0 if source is obj else obj.storage_offset()
        # a new dictionary of hooks for each tensor, because pickle would store a shared dictionary as one object
        place = offset, tuple(obj.shape), obj.stride()
        return rebuild, (_Pending(source, kind), *place, needs_grad, OrderedDict(), *rest)

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _NEVER:  # most objects in a checkpoint are numbers of random states
            return None
        is_pending = isinstance(obj, _Pending)
        kind: Any = obj.kind if is_pending else obj
        is_typed = isinstance(kind, torch.storage.TypedStorage)
        if not is_typed and not torch.is_storage(kind):
            return None
        source = obj.source if is_pending else storage_inside(obj) if is_typed else obj
        is_unread = isinstance(source, UnreadTensor)
        key = self._keys.setdefault(id(source) if is_unread else storage_key(source), count := str(len(self.sources)))
        if key is count:
            self.sources.append(source)
        size = source.nbytes if is_unread else source.nbytes()
        if is_typed:
            return "storage", getattr(torch, name_of_storage(kind)), key, "cpu", size // kind.dtype.itemsize
        return "storage", torch.UntypedStorage, key, "cpu", size


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a dense tensor in host memory without a gradient, hooks or attributes."""
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    special = value.requires_grad or value.is_quantized or value.is_nested or value.is_conj() or value.is_neg()
    return not special and not value.__dict__ and not hooks_of(value)
