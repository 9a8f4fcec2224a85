"""Copy a checkpoint's tensors into memory that two processes share."""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.base import torch_private
from drivetrain.base.packages import fcntl, psutil
from drivetrain.checkpoints.unread import HOST
from drivetrain.checkpoints.writer_process import ALIGNMENT, CONTROL

# values of these types are copied without a function call, because random states have thousands of numbers
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
# a copy needs this many times the memory of the tensors, because of the pickled structure and the allocator
_MARGIN = 1.05


class NoRoomError(Exception):
    """The host has too little memory for a copy. The message contains the needed and the available number of bytes."""


class Arena:
    """Host memory that holds copies of a checkpoint's tensors. The next checkpoint reuses this memory.

    The memory is a file without a name. A process that inherits the file's descriptor can map the file. The file grows
    to the size of the largest checkpoint. The copies stay until :meth:`clear` is called.

    Attributes:
        descriptor: the open file.
        size: the file's size in bytes.
    """

    def __init__(self) -> None:
        self.descriptor = _new_memory()
        self.size, self._used = 0, CONTROL
        self._map: Any = None
        # The address and the size of each mapping of the file. Tensors may still use earlier mappings.
        self._mapped: list[tuple[int, int]] = []
        # The tensors with the copies of this checkpoint, and with the copies of the previous one. A copy reuses an
        # earlier tensor with the same offset, dtype, shape and strides.
        self._views: dict[Any, Tensor] = {}
        self._views_before: dict[Any, Tensor] = {}
        self._unpin: Callable[[], object] | None = None
        self._unfilled: list[tuple[Tensor, Tensor]] = []  # the copies that have no values yet, each with its source
        self._copying: list[torch.Event] = []  # for each device, an event that follows the copies
        self._grow(CONTROL)

    def close(self) -> None:
        """Free the memory. No tensor may use the memory afterwards."""
        self._forget_views()
        self._end_pin()
        self._map, self._mapped = None, []
        os.close(self.descriptor)

    def clear(self) -> None:
        """Let the next copies overwrite the present copies."""
        self._used = CONTROL
        self._views_before, self._views = self._views, {}
        del self._mapped[:-1]

    def hurry(self, now: bool) -> None:
        """Tell the writing process whether this process waits for it. If so, the writing process makes no pauses."""
        if self._map is not None:
            self._map[0] = now

    def hold(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a tensor in this memory for each of ``tensors``. :meth:`fill` copies the values. See :func:`copied`.

        If this memory is page-locked for a device, this method already queues the copies from the device.

        Raises:
            NoRoomError: the host has too little memory.
        """
        places, end = [], self._used
        for tensor in tensors:
            places.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._grow(end)
        self._used = end
        copies = list(map(self._view, tensors, places))
        self._unfilled += zip(copies, (tensor.detach() for tensor in tensors), strict=True)
        if self._unpin is not None:
            self._copy([pair for pair in self._unfilled if pair[1].device != HOST])
            self._unfilled = [pair for pair in self._unfilled if pair[1].device == HOST]
        return copies

    def fill(self) -> None:
        """Copy the values of the tensors that were passed to :meth:`hold`. Other threads can run Python during this
        call. When the call returns, devices may still be copying. A device finishes the copies before it begins later
        operations. :meth:`wait` waits for the devices.
        """
        unfilled, self._unfilled = self._unfilled, []
        devices = {tensor.device for _, tensor in unfilled} - {HOST}
        if devices and self._unpin is None:
            self._unpin = _pin(next(iter(devices)), *self._mapped[-1])
        self._copy(unfilled)

    def wait(self) -> None:
        """Wait until the devices have made the copies. Any thread can call this method."""
        for event in self._copying:
            event.synchronize()
        self._copying = []

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if not pairs:  # torch._foreach_copy_ requires at least one tensor
            return
        copies, tensors = map(list, zip(*pairs, strict=True))
        pinned = self._unpin is not None
        with torch.no_grad():
            torch_private.foreach_copy_(copies, tensors, non_blocking=pinned)
        for device in {tensor.device for tensor in tensors} - {HOST} if pinned else ():
            self._copying.append(event := torch.Event(device))
            event.record(torch.accelerator.current_stream(device))

    def place_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the offset of ``storage`` in this memory; ``None`` if the storage is elsewhere."""
        address = storage.data_ptr()
        return next((address - begin for begin, size in self._mapped if begin <= address < begin + size), None)

    def _grow(self, size: int) -> None:
        if size <= self.size:
            return
        if (available := available_memory()) < _MARGIN * (size - self.size):
            raise NoRoomError(
                f"a copy of it needs {size - self.size} bytes more of host memory, and {available} are available"
            )
        try:
            os.ftruncate(self.descriptor, size)
            grown = mmap.mmap(self.descriptor, size)  # earlier mappings stay while tensors use them
        except OSError as error:  # for example, a limit on file sizes also applies to files in memory
            raise NoRoomError(f"memory for a copy of it, {size} bytes, cannot be had: {error}") from error
        self._forget_views()
        self._end_pin()
        self._map, self.size = grown, size
        self._mapped.append((torch.frombuffer(grown, dtype=torch.uint8).data_ptr(), size))

    def _end_pin(self) -> None:
        self.wait()
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def _forget_views(self) -> None:
        self._views.clear()
        self._views_before.clear()

    def _view(self, tensor: Tensor, at: int) -> Tensor:
        key = at, tensor.dtype, tensor.shape, tensor.stride()
        if key in self._views_before:
            self._views[key] = self._views_before.pop(key)
        elif key not in self._views:
            if not tensor.numel():
                return torch.empty_like(tensor, device="cpu")
            flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            # like clone(), a copy keeps the order of the elements in memory, such as channels_last
            strides = torch.empty_like(tensor, device="meta").stride()
            self._views[key] = flat.as_strided(tensor.shape, strides)
        return self._views[key]


def _pin(device: torch.device, address: int, size: int) -> Callable[[], object] | None:
    """Page-lock host memory. A copy from ``device`` to this memory is then four times as fast.

    Returns: a function that unlocks the memory; ``None`` if torch or the system cannot lock the memory.
    """
    runtime = getattr(getattr(torch, device.type, None), "cudart", None)  # under ROCm, torch uses the name cudart too
    if runtime is None:
        return None
    if (calls := runtime()).cudaHostRegister(address, size, 0) != calls.cudaError.success:
        with contextlib.suppress(RuntimeError):
            torch.ones((), device=device)  # raise the pending CUDA error here, and not in a training step
        return None
    return lambda: calls.cudaHostUnregister(address)


def _new_memory() -> int:
    """Return the descriptor of a new file in memory. The descriptor is above 2, because the descriptors 0 to 2 are the
    standard streams of the other process.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            stack.callback(os.close, descriptor := os.memfd_create("drivetrain-checkpoint"))
        else:
            descriptor = stack.enter_context(tempfile.TemporaryFile()).fileno()
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def copied(tree: Any, hold: Callable[[Sequence[Tensor]], list[Tensor]]) -> Any:
    """Copy ``tree``. ``hold`` copies the tensors, and deepcopy copies all other values. A tensor that occurs twice,
    such as a tied weight, is copied once.

    Args:
        tree: dictionaries, lists and tuples. Tensors of subclasses and tensors without dense storage are copied by
            deepcopy.
        hold: :meth:`Arena.hold`, or :func:`fresh`.
    """
    found: dict[Any, Tensor] = {}
    keys: dict[int, Any] = {}

    def find(tensor: Tensor) -> Tensor:
        keys[id(tensor)] = key = _key(tensor)
        return found.setdefault(key, tensor)

    _map_tensors(find, tree, lambda other: other, _is_dense)
    copies = dict(zip(found, hold(list(found.values())), strict=True))
    is_found = lambda value: id(value) in keys  # noqa: E731  # ten times as fast as _is_dense
    return _map_tensors(lambda tensor: _like(tensor, copies[keys[id(tensor)]]), tree, _copied_other, is_found)


def fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies in new host memory."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _key(tensor: Tensor) -> Any:
    if not tensor.numel():
        return id(tensor)
    same = tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    return *same, tensor.is_conj(), tensor.is_neg()


def _like(tensor: Tensor, made: Tensor) -> Tensor:
    if type(tensor) is nn.Parameter:
        return nn.Parameter(made, tensor.requires_grad)
    return made.detach().requires_grad_() if tensor.requires_grad else made


def _copied_other(value: Any) -> Any:
    if type(value) is Tensor and value.layout is not torch.strided:  # deepcopy does not support most of these layouts
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(value)


def _is_dense(value: Any) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    return not (value.is_quantized or value.is_meta or value.__dict__)


def _map_tensors(
    function: Callable[[Tensor], Any], value: Any, other: Callable[[Any], Any], is_tensor: Callable[[Any], bool]
) -> Any:
    """Apply ``function`` to each leaf of ``value`` that ``is_tensor`` accepts, and ``other`` to each remaining leaf."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        rebuilt = kind(
            (key, each if type(each) in _PLAIN else _map_tensors(function, each, other, is_tensor))
            for key, each in value.items()
        )
        if kind is OrderedDict:
            # the attribute _metadata of a state_dict contains the versions of modules
            vars(rebuilt).update(other(vars(value)))
        return rebuilt
    if kind in (list, tuple):
        return kind(
            [each if type(each) in _PLAIN else _map_tensors(function, each, other, is_tensor) for each in value]
        )
    return function(value) if is_tensor(value) else other(value)


def available_memory() -> int:
    """Return how many bytes of host memory this process can still use.

    If the process is in a container (cgroup), the container's memory limit counts.
    """
    found = [psutil.virtual_memory().available]
    for folder, most, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit, now = (int(Path(folder, name).read_text()) for name in (most, used))
            found.append(limit - now + _cache_of(Path(folder)))
    return max(0, min(found))


def _cache_of(folder: Path) -> int:
    """Return the number of bytes of cached files. A cgroup counts these bytes as used, although the system can free
    them.
    """
    with contextlib.suppress(OSError, ValueError):
        entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(entries.get("inactive_file", 0)) + int(entries.get("active_file", 0))
    return 0
