"""The process in a Ray actor that becomes a rank. This file is imported only if Ray is used.

Objects are pickled with Ray's cloudpickle. cloudpickle also pickles the code of classes that another process cannot
import, such as the classes of a notebook.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.util
import torch
from ray import cloudpickle

from drivetrain.accelerators.accelerator import HOST
from drivetrain.clusters.local import free_port
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import child
from drivetrain.launchers._ending import Ended
from drivetrain.launchers._process_state import ProcessState
from drivetrain.launchers.failure import Failure
from drivetrain.launchers.ray import Seat, hides_devices


@dataclass(frozen=True)
class Origin:
    """The state of the launching process that each actor applies.

    Attributes:
        node: Ray's id of the launching process's machine.
        directory: the launching process's working directory.
        path: the launching process's ``sys.path``.
        argv: the launching process's command line.
        state: the launching process's environment variables, torch settings and random state.
    """

    node: str
    directory: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    state: ProcessState


class RayActor:
    """One process of the job."""

    def seat(self) -> Seat:
        """Return the machine, the process id and the devices of this actor."""
        context = ray.get_runtime_context()
        reserved = [set(ids) for ids in context.get_accelerator_ids().values() if ids]
        hiding = {
            name: ids for name, ids in os.environ.items() if hides_devices(name) and set(ids.split(",")) in reserved
        }
        return Seat(context.get_node_id(), ray.util.get_node_ip_address(), free_port(), os.getpid(), hiding)

    def run(self, variables: Mapping[str, str], threads: str | None, origin: bytes, call: bytes) -> bytes | Ended:
        """Become a rank and call the function. Rank 0 returns the pickled result, and the other ranks return ``b""``.
        After an exception, return an :class:`Ended`.

        Args:
            variables: the environment variables with the rank.
            threads: the value of ``OMP_NUM_THREADS``. ``None`` keeps the value that Ray has set.
            origin: a pickled :class:`Origin`.
            call: the pickled function with its arguments.
        """
        _handle_signals()
        try:
            _become(variables, threads, pickle.loads(origin))
            function, args, kwargs = _opened(call)
            result = function(*args, **kwargs)
            return packed(result, "The result of rank 0", "Return plain data.") if variables["RANK"] == "0" else b""
        except BaseException as error:
            return _ended(error)


def _handle_signals() -> None:
    """Replace Ray's signal handlers with Python's default handlers, so that a fit saves after SIGTERM and SIGINT.

    With Ray's handlers, SIGTERM ends the process at once, and SIGINT is blocked. The launching process forwards both
    signals to this process. This process also starts its own session, so that it gets no signals directly from the
    terminal.
    """
    with suppress(OSError):  # OSError: the process already leads a group
        os.setsid()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def send_signal(pids: Sequence[int], number: int) -> None:
    """Send a signal to processes of this machine."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def packed(value: Any, what: str, cure: str) -> bytes:
    """Return ``value`` pickled for another process, which may be on another machine.

    Args:
        value: any value. Tensors are pickled with their data, and unpickled in host memory.
        what: the value's name in a message.
        cure: what to do if ``value`` cannot be pickled.

    Raises:
        ConfigurationError: the value cannot be pickled.
    """
    stream = io.BytesIO()
    try:
        _Portable(stream).dump(value)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"{what} cannot be pickled, to be sent to another process: {error}. {cure}") from error
    return stream.getvalue()


class _Portable(cloudpickle.Pickler):  # type: ignore[misc]  # Ray is not installed where types are checked
    """Pickles tensors with their data. Views of one storage stay views, because the storage is written only once."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._memories: dict[tuple[int, torch.dtype], torch.TypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return super().reducer_override(obj)
        # pickling a Parameter calls this method a second time, with a plain tensor
        if obj.device.type not in (HOST.type, "meta") and type(obj) is torch.Tensor:
            obj = obj.detach().to(HOST).requires_grad_(obj.requires_grad)
        return child.by_value(obj, self._memories)


def _become(variables: Mapping[str, str], threads: str | None, origin: Origin) -> None:
    """Give this process the state that a child of the launching process would have."""
    state = origin.state
    # on another machine, environment variables that are already set keep their values
    if ray.get_runtime_context().get_node_id() != origin.node:
        missing = {name: value for name, value in state.environ.items() if name not in os.environ}
        state = replace(state, environ=missing)
    if os.path.isdir(origin.directory):
        os.chdir(origin.directory)
    sys.argv[:] = origin.argv
    sys.path.extend(entry for entry in origin.path if entry not in sys.path)
    state.apply({**variables, **({} if threads is None else {"OMP_NUM_THREADS": threads})})
    # torch has already read OMP_NUM_THREADS, and does not see the new value
    if threads is not None and threads.isdigit():
        torch.set_num_threads(int(threads))


def _opened(call: bytes) -> child.Call:
    try:
        opened: child.Call = pickle.loads(call)
    except ImportError as error:
        raise ConfigurationError(
            f"The launching process has sent objects that need a module which this machine does not find: {error}. "
            'Install it there, or send the folder, too: ray.init(runtime_env={"working_dir": "."}) before the launch.'
        ) from error
    return opened


def _ended(error: BaseException) -> Ended:
    if isinstance(error, SystemExit) and not isinstance(error.__cause__, KeyboardInterrupt):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        summary = "ended before its function returned; what it wrote stands above."
        return Ended(Failure(time.monotonic(), summary, "Return in place of calling sys.exit()."), code)
    failure = child.failure_of(error)
    with suppress(Exception):  # an exception that cannot be pickled is reported as text only
        # pickle cannot pickle an exception if the program's file defines its class
        failure = replace(failure, exception=cloudpickle.dumps(error))
    return Ended(failure)
