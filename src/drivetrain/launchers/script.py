"""Start the program's command again, once per device. Each process runs the complete script as a rank."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from drivetrain.base import torch_private
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import orphan, stacks
from drivetrain.launchers._ending import Ending
from drivetrain.launchers.board import BOARD, Board, say
from drivetrain.launchers.external import ExternalLauncher
from drivetrain.launchers.failure import first_of, read_failure
from drivetrain.launchers.folder import job_folder
from drivetrain.launchers.launcher import LAUNCHER, STARTED_IN, Launcher, in_notebook, variables_of, was_started
from drivetrain.launchers.signals import Sent, forwarding, say_who_is_killed, was_asked_to_end
from drivetrain.launchers.watch import Watch

_POLL_S = 0.1
_LAST_WORDS_S = 1.0  # after a process has failed, the others have this many seconds to print their errors
_HANGS = 10**6  # returned in place of an exit code if the ranks wait for each other forever
_GRACE_S = 5.0  # after SIGTERM, the remaining processes have this many seconds to end


class ScriptLauncher(Launcher):
    """Starts this program's command once for each rank, and supervises the processes.

    This process is not a rank. :meth:`launch` never returns: it waits, and ends this process with the job's exit code.
    Nothing has to be pickled. A debugger sees an ordinary program, and ``breakpoint()`` works on rank 0. The script's
    code before the call of ``fit`` runs in each process.

    The processes get the current environment variables and the variables of a rank. The processes also get the command
    line and the working directory with which this program was started. A later change of ``sys.argv`` or of the working
    directory has no effect.

    Args:
        environment: provides the machine's node rank, and the main address and port.
        num_processes: the number of processes on this machine.
        num_nodes: the number of machines. The program is started once on each machine.
    """

    _names = ("popen",)
    reruns_program = True
    endings: ClassVar = {"popen": ("",)}

    @classmethod
    def for_job(cls, *job: Any, **options: Any) -> Launcher:
        """Return an instance of this class. In a process that this launcher has started, return an
        ``ExternalLauncher``.

        This prevents an endless chain of launches if a user's cluster environment does not detect that this process is
        a rank.
        """
        return ExternalLauncher() if was_started() else super().for_job(*job, **options)

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Start the processes, wait, and end this process.

        Raises:
            ConfigurationError: there is no command that runs this program again.
            SystemExit: always. If this process got the signal n, the exit code is 128 + n, even if all processes
                succeeded. Otherwise, the exit code is 0 if all processes succeeded, and 1 if the processes hang. In all
                other cases, it is the exit code of the process that failed first.
        """
        command = command_again()
        variables = variables_of(self.environment, self.num_processes, self.num_nodes)
        if sys.stdout is not None:  # None if the program has no standard output
            sys.stdout.flush()
        processes: list[subprocess.Popen[bytes]] = []
        early: list[int] = []  # signals that arrived before all processes had started
        have_started = False

        def send(number: int) -> None:
            if have_started:
                _send(processes, number)
            else:
                early.append(number)

        first, size = self.environment.node_rank() * self.num_processes, self.num_processes * self.num_nodes
        with job_folder() as folder, forwarding(send, self.stop_timeout_s) as sent:
            board = Board(folder, range(first, first + self.num_processes), size)
            own = {LAUNCHER: str(os.getpid()), BOARD: str(folder)}
            try:
                for each in variables:
                    processes.append(_started(command, {**each, **own}))
                have_started = True
                for number in early:
                    _send(processes, number)
                code = _first_failure(processes, sent, board, self.stop_timeout_s)
                if was_asked_to_end(code) or time.monotonic() >= sent.deadline:
                    late = {rank: each.pid for rank, each in enumerate(processes) if each.poll() is None}
                    say_who_is_killed(board, late, min(sent.limit_s, self.stop_timeout_s))
            finally:
                _end(processes)
            if sent.number is not None:
                sys.exit(128 + sent.number)
            if code == _HANGS:
                sys.exit(1)
            if code and not was_asked_to_end(code):
                code = _report(processes, board, code)
        sys.exit(code if code >= 0 else 128 - code)


def _started(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank in a new session. The rank then gets no signals from the terminal, but only from this process."""
    return subprocess.Popen(
        command, env={**os.environ, **variables}, cwd=_directory(), start_new_session=True,
        preexec_fn=_dies_with_launcher(),
    )  # fmt: skip


def _dies_with_launcher() -> Callable[[], None] | None:
    """Return a function that a new process runs first. The process then ends if the launching process is killed. Return
    ``None`` if the operating system does not support this.
    """
    if sys.platform != "linux":
        return None
    launcher = os.getpid()

    def follow() -> None:
        torch_private.signal_at_parents_end(signal.SIGTERM)
        if os.getppid() != launcher:  # the launching process had already ended
            os._exit(128 + signal.SIGTERM)

    return follow


def _report(processes: Sequence[subprocess.Popen[bytes]], board: Board, code: int) -> int:
    """Print which rank failed first, its phase, its step and its traceback. Return the exit code of the job."""
    local = next(rank for rank, process in enumerate(processes) if process.returncode == code)
    failures = {rank: found for rank in range(len(processes)) if (found := read_failure(board.folder, rank))}
    # if the process was killed or has written no failure, its end has caused the failures of the other processes
    if code < 0 or local not in failures:
        end = f"was ended by the signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        say(board.report(local, processes[local].pid, end, ""))
        return code
    local = first_of(failures)
    code, failure = processes[local].returncode or code, failures[local]
    left = [rank for rank, each in enumerate(processes) if each.poll() == 0 and board.left_its_run(rank)]
    if failure.follows and left:  # the cause is a rank that ended before its run ended, without an error
        say(board.report(left[0], processes[left[0]].pid, "ended with exit code 0", ""))
    else:
        say(board.report(local, processes[local].pid, f"{failure.summary}\nThat was", failure.traceback))
    return code


def _first_failure(
    processes: Sequence[subprocess.Popen[bytes]], sent: Sent, board: Board, stop_timeout_s: float
) -> int:
    """Wait until all processes have ended. If a process has failed, give the other processes time to print their
    errors.

    The process that failed first is not always the first to end. While this process prints its traceback, another
    process may end because of a lost connection. If all processes were killed at that moment, the first process's
    traceback would be lost. After a signal, the processes have time to save.

    Returns: The first nonzero exit code, 0 if all processes succeeded, or ``_HANGS`` if the processes wait for each
    other forever.
    """
    watch, ending, first = Watch(board), Ending(board, stop_timeout_s, _LAST_WORDS_S), 0
    while True:
        codes = [process.poll() for process in processes]
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not first and any(codes):
            first = next(code for code in codes if code)
            if not was_asked_to_end(first):
                stacks.note_collectives(board, running)
            elif sent.number is None:  # a second signal could interrupt a save that the first signal has started
                _send(processes, signal.SIGTERM)
        if first:
            ending.look(running, asked=was_asked_to_end(first), failed=False)
        if not running or time.monotonic() >= min(ending.deadline, sent.deadline):
            return first
        if not first and (text := watch.look()):
            say(text)
            return _HANGS
        time.sleep(_POLL_S)


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        # not sent to the process group, because the rank needs its DataLoader workers until it has saved
        process.send_signal(number)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the remaining processes and their children."""
    running = [process for process in processes if process.poll() is None]
    for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = math.inf if grace_s is None else time.monotonic() + grace_s
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if any(process.returncode for process in processes):
        orphan.kill_workers({process.pid for process in processes})


def started_by_rank() -> int:
    """Return the process id of the rank that has started this process, or 0 if no rank has started it.

    A child process of a rank inherits the rank's environment variables, and would therefore join the job with the same
    rank. Works only on Linux.
    """
    parent = os.getppid()
    try:
        launcher = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
        variables = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except OSError:
        return 0
    inherited = all(f"{name}={os.environ.get(name)}".encode() in variables for name in ("RANK", "MASTER_PORT"))
    return parent if inherited and os.environ.get(LAUNCHER) == launcher else 0


def command_again() -> list[str]:
    """Return the command that runs this program again from its original directory.

    Raises:
        ConfigurationError: there is no such command, or the command would start a host of this program, such as pytest.
    """
    host = _host()
    if host is not None:
        name, instead = host
        raise ConfigurationError(
            f"Each process would run {name} again, because it runs the program's command. Write strategy={instead}."
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _host() -> tuple[str, str] | None:
    """If this program runs inside a host (a notebook, pytest, ...), return the host's name and a strategy that works
    there. Otherwise, return ``None``.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if in_notebook():
        return "the notebook", '"ddp_notebook"'
    if "_pytest.runner" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "pytest", '"ddp_spawn"'
    if spec is not None and spec.name.partition(".")[0] == "unittest":
        return "unittest", '"ddp_spawn"'
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "the interactive session", '"ddp_fork", or put the program into a file'
    if getattr(main, "__file__", "<stdin>") == "<stdin>" and "-c" not in sys.orig_argv:
        return "a program that came from the standard input", '"ddp_fork", or put the program into a file'
    return None


def _directory() -> str:
    """Return the working directory in which this program was started."""
    main = sys.modules.get("__main__")
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None:
        return STARTED_IN
    if spec is not None:  # with python -m, sys.path[0] is the working directory
        root = str(Path(path).parents[spec.name.count(".")])
        return root if root == sys.path[0] else STARTED_IN
    # Python makes the script's path in __main__ absolute when the program starts
    for argument in map(os.path.normpath, sys.orig_argv[1:]):
        if not os.path.isabs(argument) and path.endswith(f"{os.sep}{argument}"):
            return str(path.removesuffix(f"{os.sep}{argument}")) or os.sep
    return STARTED_IN
