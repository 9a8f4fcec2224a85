"""Start one replica with torch_xla for each device of this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.base import files
from drivetrain.base.packages import torch_xla, xla_multiprocessing, xla_runtime
from drivetrain.clusters.xla import check_no_launcher
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import child
from drivetrain.launchers._ending import Ended
from drivetrain.launchers._fork import check_fork
from drivetrain.launchers._process_state import ProcessState
from drivetrain.launchers.failure import first_of, read_failure
from drivetrain.launchers.folder import job_folder
from drivetrain.launchers.launcher import Launcher, threads_each

_METHOD = "fork"
_LOOK_EVERY_S = 0.2
# seconds for a failed replica to report, after another replica has reported a lost connection
_ECHO_S = 1.0

# The keys are the paths of jobs' folders. The values are the state that forked replicas apply, the function that they
# call, and the number of torch's threads.
_calls: dict[str, tuple[child.Sealed[ProcessState], child.Sealed[child.Call], int | None]] = {}


class XLALauncher(Launcher):
    """Forks this process with ``xmp.spawn``, once for each replica. This process only waits, and is not a replica.

    Each replica gets the environment variables ``RANK``, ``LOCAL_RANK``, ``NODE_RANK``, ``WORLD_SIZE`` and
    ``LOCAL_WORLD_SIZE``, with torch_xla's numbers. If ``OMP_NUM_THREADS`` is not set, each replica gets its share of
    the processors as ``OMP_NUM_THREADS``. Each replica also gets this process's random state. ``launch`` can be called
    repeatedly, and returns a copy of local rank 0's result. With one device no process is started, and this process is
    the replica.

    Raises:
        ConfigurationError: torch_xla's runtime has started in this process, and owns the devices. Or torch has used
            threads in this process, which forked processes lack.
        LaunchError: a replica failed.
    """

    _names = ("xla",)
    is_interactive_compatible = True
    leaves_one_here = True
    endings: ClassVar = {"xla": ()}  # an empty tuple, because no strategy's name ends with "_xla"

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        threads = threads_each(self.num_processes)
        self._check(threads)
        call: child.Call = (function, args, kwargs)
        with job_folder() as folder:
            _calls[str(folder)] = child.Sealed(ProcessState.current()), child.Sealed(call), threads
            try:
                with _kills_the_others(folder):
                    xla_multiprocessing.spawn(_replica, args=(str(folder),), nprocs=None, start_method=_METHOD)
                return child.read_result(folder)
            except BaseException:
                self._explain(folder)
                raise
            finally:
                del _calls[str(folder)]

    def _check(self, threads: int | None) -> None:
        check_no_launcher()
        if torch_xla._XLAC._xla_runtime_is_initialized():
            raise ConfigurationError(
                "torch_xla's runtime has started in this process, and the replicas, which are copies of it, cannot use "
                "that runtime. Call fit before anything is computed on an XLA device here, and create tensors inside "
                "the module's hooks."
            )
        check_fork(threads)

    def _explain(self, folder: Path) -> None:
        """If a replica has reported a failure, raise an exception about this failure."""
        failures = {rank: found for rank in range(self.num_processes) if (found := read_failure(folder, rank))}
        if failures:
            rank = first_of(failures)
            raise Ended(failures[rank]).error(rank, f"Replica {rank} of this machine's {self.num_processes}")


def _replica(ordinal: int, folder: str) -> None:
    """Call the function in a replica. The replica finds the function in the memory that it has inherited from the
    launching process.
    """
    local_rank = int(xla_runtime.local_ordinal())
    files.write(Path(folder) / f"{local_rank}.pid", str(os.getpid()).encode())
    variables = {
        "RANK": ordinal, "LOCAL_RANK": local_rank, "NODE_RANK": xla_runtime.host_index(),
        "WORLD_SIZE": xla_runtime.world_size(), "LOCAL_WORLD_SIZE": xla_runtime.local_device_count(),
    }  # fmt: skip
    state, call, threads = _calls[folder]
    if threads is not None:
        variables["OMP_NUM_THREADS"] = threads
    place = child.Place(local_rank, {name: str(value) for name, value in variables.items()}, threads, Path(folder))
    if (replicas := int(xla_runtime.addressable_device_count())) > 1:
        call = child.Sealed((_refuse_threads, (replicas,), {}))
    child.run(place, state, call)


def _refuse_threads(count: int) -> None:
    raise ConfigurationError(
        f"torch_xla runs {count} replicas of this machine as threads of one process, but drivetrain's ranks are "
        'processes. Write strategy="xla_spmd", which drives all devices from one process, or devices=1.'
    )


@contextmanager
def _kills_the_others(folder: Path) -> Iterator[None]:
    """Context in which all replicas are killed soon after one replica has failed. The others would wait for the failed
    replica.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_EVERY_S):
            if any(folder.glob("*.failure")):
                done.wait(_ECHO_S)
                break
        deadline = time.monotonic() + _ECHO_S
        while not done.is_set() and time.monotonic() < deadline:
            for path in folder.glob("*.pid"):
                if not child.has_finished(folder, int(path.stem)):
                    with suppress(ProcessLookupError, ValueError):
                        os.kill(int(path.read_bytes()), signal.SIGKILL)
            done.wait(_LOOK_EVERY_S)

    thread = threading.Thread(target=watch, name="drivetrain replicas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
