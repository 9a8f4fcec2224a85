"""The code that runs in a started process. It applies the launching process's state, calls the function, and writes the
function's result to a file.

Reports are pickled files in a folder that only this user may enter. Unpickling a report is safe, because a process of
this job has written it.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from drivetrain.base import files, torch_private
from drivetrain.base.torch_private import PARAMETERS
from drivetrain.checkpoints import container
from drivetrain.errors import ConfigurationError, PeerError, text_of
from drivetrain.launchers._process_state import ProcessState
from drivetrain.launchers.failure import Failure
from drivetrain.launchers.launcher import in_notebook
from drivetrain.launchers.signals import allow_interrupts
from drivetrain.launchers.tracebacks import place_of_user, traceback_of_user

T = TypeVar("T")

# an environment variable that makes torch.load refuse objects even if weights_only=False
_PLAIN_DATA_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class Sealed(Generic[T]):
    """A value for another process. The value is unpickled when the other process calls :meth:`open`.

    Tensors are pickled with their data. By default, torch would move pickled tensors into shared memory. All replicas
    would then train the same weights, and shared memory is often small. Tensors that are already in shared memory stay
    shared.
    """

    _pickled: bytes = b""

    def __init__(self, value: T) -> None:
        self._value = value

    def open(self) -> T:
        """Return the value. Unpickling the value can import user code."""
        if not self._pickled:
            return self._value
        return pickle.loads(self._pickled)

    def __getstate__(self) -> dict[str, Any]:
        stream = io.BytesIO()
        try:
            _ByValue(stream).dump(self._value)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"Something that the new processes need cannot be pickled: {error}{_holder(self._value)}. Define "
                "classes and functions at the top level of a file, or use a start_method that does not pickle: "
                '"fork" or "popen". [DT1051]'
            ) from error
        return {"_pickled": stream.getvalue()}


class _ByValue(ForkingPickler):
    """Pickles tensors with their data. Views of one storage stay views, because the storage is written only once."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._memories: dict[tuple[int, torch.dtype], torch.TypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            _check_main(obj)
        if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(obj, torch.Tensor) or _in_shared_memory(obj):
            return NotImplemented
        return by_value(obj, self._memories)


class _Trail(pickle._Pickler):
    """A pickler that writes nothing. After an exception, the last entry of ``held`` is the object that cannot be
    pickled. Each earlier entry contains the next entry.
    """

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(write=len), pickle.HIGHEST_PROTOCOL)
        self._rules = _ByValue(io.BytesIO())
        self.dispatch_table = self._rules.dispatch_table
        self.held: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        return self._rules.reducer_override(obj)

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        self.held.append(obj)
        super().save(obj, save_persistent_id)  # type: ignore[misc]  # the stub lacks this parameter
        self.held.pop()


def _holder(value: Any) -> str:
    """Return a text for an error message, which names the attribute that cannot be pickled and the class of its object.
    Return "" if no attribute is the cause.
    """
    trail = _Trail()
    with suppress(Exception):
        trail.dump(value)
    held = trail.held
    for at in reversed(range(len(held) - 2)):
        if isinstance(held[at], (Mapping, list, tuple, set, frozenset, partial)):
            continue
        # the object's state: its dictionary, or a pair of its dictionary and its slots
        for state in range(at + 1, min(at + 3, len(held) - 1)):
            name = _key(held[state], held[state + 1]) if type(held[state]) is dict else None
            if not isinstance(name, str):
                continue
            for outer, inner in pairwise(held[state + 1 :]):
                if (key := _key(outer, inner)) is None:
                    break
                name += f"[{key!r}]"
            return f", in the attribute `{name}` of {type(held[at]).__qualname__}"
    return ""


def _key(container: Any, item: Any) -> Any:
    """Return the key or the index of ``item`` in ``container``, or ``None`` if ``container`` has no such item."""
    if not isinstance(container, (Mapping, list, tuple)):
        return None
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    return next((key for key, value in items if value is item), None)


def _check_main(obj: Any) -> None:
    """Check that a new Python process can import ``obj``, a class or function of ``__main__``.

    Raises:
        ConfigurationError: the program is a notebook or an interactive session.
    """
    main = sys.modules.get("__main__")
    if in_notebook():
        where, strategy = "this notebook", "ddp_notebook"
    elif getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None:
        where, strategy = "this interactive session", "ddp_fork"
    else:
        return
    raise ConfigurationError(
        f"The new processes cannot import {obj.__qualname__}, which is defined in {where}. Write "
        f'strategy="{strategy}", whose processes are copies of this one, or import it from a file. [DT1052]'
    )


def by_value(tensor: torch.Tensor, memories: dict[tuple[int, torch.dtype], torch.TypedStorage]) -> tuple[Any, ...]:
    """Return the result of ``tensor.__reduce_ex__()``, which contains the tensor's data.

    ``memories`` holds the storages that were already pickled, so that views of one storage stay views.
    """
    make, arguments, *rest = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    if arguments and isinstance(arguments[0], torch.TypedStorage):
        memory, *others = arguments
        if address := tensor.untyped_storage().data_ptr():
            memory = memories.setdefault((address, tensor.dtype), memory)
        arguments = (memory, *others)
    return make, arguments, *rest


@dataclass(frozen=True)
class Place:
    """The rank and the settings of a process.

    Attributes:
        variables: the environment variables with the rank.
        threads: the number of torch's threads, or ``None`` to use ``OMP_NUM_THREADS``.
        folder: the folder for reports.
    """

    local_rank: int
    variables: Mapping[str, str]
    threads: int | None
    folder: Path


Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]


def run(place: Place, state: Sealed[ProcessState], call: Sealed[Call]) -> None:
    """Call the function in a started process. If the function raises an exception, the process ends with exit code
    1.
    """
    if sys.platform == "linux":
        torch_private.signal_at_parents_end(signal.SIGKILL)  # the process must not outlive the launching process
        launcher = multiprocessing.parent_process()
        # the launching process died before the line above
        if launcher is not None and not launcher.is_alive():
            os._exit(128 + signal.SIGTERM)
        # a new session, so that the terminal's signals arrive only through the launching process
        os.setsid()
    try:
        allow_interrupts()
        state.open().apply(place.variables)
        # Called even if the number does not change. In a forked process, the first call creates a new thread pool of
        # torch. If another thread needed the pool during this call, torch would abort the process.
        torch.set_num_threads(place.threads or torch.get_num_threads())
        function, args, kwargs = call.open()
        own_parameters()
        result = function(*args, **kwargs)
        if place.local_rank:
            files.write(place.folder / f"{place.local_rank}.result", b"")
        else:
            write_result(place.folder, result)
    except BaseException as error:
        if isinstance(error, SystemExit) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        write_failure(place.folder, place.local_rank, error)
        sys.exit(1)


def own_parameters() -> None:
    """Copy this process's parameters and buffers from shared memory into the process's own memory."""
    copies: dict[int, torch.UntypedStorage] = {}
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or PARAMETERS not in vars(module):
            continue
        for tensor in (*nn.Module.parameters(module, False), *nn.Module.buffers(module, False)):
            if not _in_shared_memory(tensor):
                continue
            shared = tensor.untyped_storage()
            address = shared.data_ptr()
            if address not in copies:
                copies[address] = shared.clone()  # type: ignore[no-untyped-call]
            own = torch.empty(0, dtype=tensor.dtype)
            tensor.data = own.set_(copies[address], tensor.storage_offset(), tensor.size(), tensor.stride())


def write_result(folder: Path, result: Any) -> None:
    """Write the function's result in the file format of checkpoints. Called in local rank 0.

    Raises:
        ConfigurationError: the result cannot be pickled.
    """
    try:
        with files.replacing(folder / "0.result") as stream:
            container.write(result, stream, pickle.HIGHEST_PROTOCOL)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"The result of rank 0 cannot be pickled, so the launching process cannot return it: {error}"
            f"{_holder(result)}. Return plain data and tensors."
        ) from error


def read_result(folder: Path) -> Any:
    """Return the result that local rank 0 has written, with tensors in host memory."""
    # the variable protects against files of other programs, but this program wrote this file
    forced = os.environ.pop(_PLAIN_DATA_ONLY, None)
    try:
        return torch.load(folder / "0.result", map_location="cpu", weights_only=False)
    finally:
        if forced is not None:
            os.environ[_PLAIN_DATA_ONLY] = forced


def has_finished(folder: Path, local_rank: int) -> bool:
    """Whether the function has returned in the process with this local rank."""
    return (folder / f"{local_rank}.result").exists()


def write_failure(folder: Path, local_rank: int, error: BaseException) -> None:
    """Write the report on why this process ends. Later calls have no effect."""
    if not (folder / f"{local_rank}.failure").exists():
        files.write(folder / f"{local_rank}.failure", pickle.dumps(failure_of(error)))


def failure_of(error: BaseException) -> Failure:
    """Return the report for a process that ends with ``error``."""
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = b""
    place = place_of_user(error)
    return Failure(
        time.monotonic(),
        summary="raised " + "".join(traceback.format_exception_only(error)).strip() + (place and f"\nat {place}"),
        follows=follows(error),
        interrupted=isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt),
        traceback=traceback_of_user(error),
        exception=pickled,
    )


def follows(error: BaseException | None) -> bool:
    """Whether another rank's failure has caused ``error``. For example, ``error`` is about a lost connection."""
    declared = (PeerError, *([torch.distributed.DistError] if hasattr(torch.distributed, "DistError") else []))
    while error is not None:
        broken = any(words in text_of(error) for words in ("closed by peer", "reset by peer", "gloo"))
        if isinstance(error, declared) or (isinstance(error, RuntimeError) and broken):
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_shared_memory(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.untyped_storage().is_shared()
