"""Start the processes as forks of this process, or as new Python processes with copies of the function's arguments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing import connection
from typing import Any, ClassVar, Literal

import torch.multiprocessing

from drivetrain.base.introspect import temporarily
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError, did_you_mean
from drivetrain.launchers import child, orphan, stacks
from drivetrain.launchers._ending import Ended, Ending
from drivetrain.launchers._fork import check_fork
from drivetrain.launchers._process_state import ProcessState
from drivetrain.launchers.board import BOARD, Board
from drivetrain.launchers.failure import Failure, first_of, read_failure
from drivetrain.launchers.folder import job_folder
from drivetrain.launchers.launcher import Launcher, threads_each, variables_of
from drivetrain.launchers.signals import Sent, exception_of, forwarding, say_who_is_killed, without_interrupts

_ECHO_S = 1.0  # seconds for the failed process to report, after another process has reported a lost connection


class MultiProcessingLauncher(Launcher):
    """Starts one process per device with ``torch.multiprocessing``. This process only waits for the started processes,
    and is not a rank.

    Each process gets the environment variables of a rank: ``RANK``, ``LOCAL_RANK``, ``NODE_RANK``, ``WORLD_SIZE``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. If ``OMP_NUM_THREADS`` is not set, each process gets its
    share of the processors as ``OMP_NUM_THREADS``. Each process also gets this process's random state and torch's
    switches. With "spawn" and "forkserver" the function and its arguments are pickled, so each process has a copy of
    every tensor. With "fork" the processes inherit the function and its arguments. Tensors that the program has put
    into shared memory stay shared. Parameters and buffers of modules are never shared, because all replicas would then
    train the same weights.

    Args:
        environment: provides the machine's node rank, and the main address and port.
        num_processes: the number of processes on this machine.
        num_nodes: the number of machines. The program is started once on each machine.
        start_method: "spawn" starts new Python processes, which import the program's file. This file then needs an ``if
            __name__ == "__main__":``. "fork" copies this process, also in a notebook. The copy fails if this process
            has already used a device or torch's threads. "forkserver" copies a new Python process, and pickles like
            "spawn".
        interrupt_grace_s: after Ctrl-C, the processes have this many seconds to end, if some process has not started
            yet. After all processes have started, they have ``stop_timeout_s`` seconds.

    Raises:
        ConfigurationError: the start method is unknown, or the operating system does not support it.
    """

    _names: ClassVar = {method: {"start_method": method} for method in ("spawn", "fork", "forkserver")}
    endings: ClassVar = {"fork": ("fork", "notebook")}

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int = 1,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
        interrupt_grace_s: float = 5.0,
    ) -> None:
        known = torch.multiprocessing.get_all_start_methods()
        if start_method not in known:
            raise ConfigurationError(
                f"start_method={start_method!r}: this system does not support it. "
                f"{did_you_mean(str(start_method), known)}"
            )
        super().__init__(environment, num_processes, num_nodes)
        self.start_method = start_method
        self.is_interactive_compatible = start_method == "fork"
        self.interrupt_grace_s = interrupt_grace_s

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` in all processes. Return a copy of local rank 0's result, with tensors in host memory.

        Raises:
            ConfigurationError: the arguments cannot be pickled, or forks of this process would hang.
            LaunchError: a process failed, and the other processes were killed.
            KeyboardInterrupt: this process or a rank got SIGINT, and all ranks have ended.
            SIGTERMException: this process or a rank got SIGTERM, and all ranks have ended.
        """
        threads = threads_each(self.num_processes)
        if self.start_method == "fork":
            check_fork(threads)
        context: Any = torch.multiprocessing.get_context(self.start_method)
        state, call = child.Sealed(ProcessState.current()), child.Sealed((function, args, kwargs))
        first = self.environment.node_rank() * self.num_processes
        ranks = range(first, first + self.num_processes)
        with job_folder() as folder, self._ending_all() as processes:
            board = Board(folder, ranks, self.num_processes * self.num_nodes)
            for local_rank, told in enumerate(variables_of(self.environment, self.num_processes, self.num_nodes)):
                place = child.Place(local_rank, {**told, BOARD: str(folder)}, threads, folder)
                process = context.Process(target=child.run, args=(place, state, call))
                with _early_variables(place), without_interrupts():
                    process.start()
                    processes.append(process)  # before Ctrl-C is handled, because only processes in the list are ended
            with forwarding(lambda number: _send(processes, number), self.stop_timeout_s) as sent:
                self._wait(processes, board, sent)
            return child.read_result(folder)

    @contextmanager
    def _ending_all(self) -> Iterator[list[Any]]:
        """Context that yields a list for processes. At its end, the context kills all processes in the list, and waits
        until they have ended. After Ctrl-C, the processes first have ``interrupt_grace_s`` seconds to end.
        """
        processes: list[Any] = []
        try:
            yield processes
        except KeyboardInterrupt:
            deadline = time.monotonic() + self.interrupt_grace_s
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            raise
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                orphan.kill_workers({process.pid for process in processes})
            self.environment.teardown()

    # ---- while they run ------------------------------------------------------------------------------------------

    def _wait(self, processes: Sequence[Any], board: Board, sent: Sent) -> None:
        """Wait until all processes have ended normally, or until a process has failed. After a signal, wait until all
        processes have saved.

        Raises:
            LaunchError: a process has failed, or the ranks wait for each other.
        """
        folder, failed = board.folder, dict[int, Ended]()
        ending = Ending(board, self.stop_timeout_s, _ECHO_S)
        with _ends(processes) as running:
            for seconds in ending.turns(running.values(), failed, sent, lambda number: _send(processes, number)):
                for end in connection.wait(list(running), seconds):
                    rank = running.pop(end)
                    processes[rank].join()
                    if not child.has_finished(folder, rank):
                        code = processes[rank].exitcode
                        failed[rank] = Ended(read_failure(folder, rank) or _silent(code), code)
            if ending.by_signal or time.monotonic() >= sent.deadline:
                late = {rank: processes[rank].pid for rank in running.values()}
                say_who_is_killed(board, late, min(sent.limit_s, self.stop_timeout_s))
        if sent.number is not None:
            raise exception_of(sent.number)
        if failed:
            stacks.note_collectives(board, [each for each, process in enumerate(processes) if process.is_alive()])
            local_rank = first_of({rank: each.failure for rank, each in failed.items()})
            rank, process = board.ranks[local_rank], processes[local_rank]
            name = f"Rank {rank} of {board.world_size} (process {process.pid}, exit code {process.exitcode})"
            raise failed[local_rank].error(rank, name, (*board.places(), board.stacks(local_rank).rstrip()))


@contextmanager
def _ends(processes: Sequence[Any]) -> Iterator[dict[Any, int]]:
    """Context that yields a dictionary. Each value is a local rank. The key is an object that
    ``multiprocessing.connection.wait`` returns when the rank's process ends.

    On Linux the objects are pidfds. Python's own sentinel is a pipe that the rank's DataLoader workers keep open, too.
    With the pipe, a killed rank would seem to live until its workers end.
    """
    with ExitStack() as stack:
        ends: dict[Any, int] = {}
        for rank, process in enumerate(processes):
            try:
                end = os.pidfd_open(process.pid)
            except (AttributeError, OSError):  # this system is not Linux, or its kernel is old
                end = process.sentinel
            else:
                stack.callback(os.close, end)
            ends[end] = rank
        yield ends


def _silent(exit_code: int) -> Failure:
    """Return the failure of a process that has ended without a report."""
    now = time.monotonic()
    if name := {-known.value: known.name for known in signal.Signals}.get(exit_code):
        cure = "If you did not send it, the system ran out of memory: use smaller batches or fewer loader workers."
        return Failure(now, f"was ended by the signal {name}.", cure if name == "SIGKILL" else "")
    return Failure(
        now,
        "ended before its function returned; what it wrote stands above.",
        "Return in place of calling sys.exit(), and keep what the program's file does below an "
        'if __name__ == "__main__":.',
    )


def _send(processes: Sequence[Any], number: int) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, number)


def _early_variables(place: child.Place) -> AbstractContextManager[None]:
    """Context with the environment variables that a new process needs while it imports the program's file, before
    :func:`child.run`. The variables include the rank, so that only rank 0 logs. ``LOCAL_RANK`` is not set yet. With
    ``LOCAL_RANK``, a program without ``if __name__ == "__main__":`` would continue as a rank, instead of getting
    Python's error about the missing line.
    """
    early = {name: place.variables[name] for name in ("RANK", "OMP_NUM_THREADS") if name in place.variables}
    return temporarily(os.environ, **early)
