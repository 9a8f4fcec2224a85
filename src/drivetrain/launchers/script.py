"""The program's own command again, once per device: each process runs the whole script, and is a rank in it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch.multiprocessing

from drivetrain.base.registry import Registry
from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers.external import ExternalLauncher
from drivetrain.launchers.launcher import LAUNCHER, STARTED_IN, Launcher, in_notebook, variables_of

_POLL_S = 0.1
_LAST_WORDS_S = 1.0  # for the others to fail by themselves, and to print why, when one process has failed
_GRACE_S = 10  # for processes that are told to end


class ScriptLauncher(Launcher):
    """Starts the command that started this program, by torchelastic's means, and supervises.

    This process is no rank. It never returns from :meth:`launch`: it waits, and ends as the job has ended. Nothing has
    to be pickled, and debuggers see ordinary programs; ``breakpoint()`` works on rank 0. What the script does before
    it gets here, it does in each process.

    The processes get the environment variables that say who they are, the command line and the working directory with
    which this one was started, whatever the script has made of ``sys.argv`` and its directory meanwhile, and
    the environment as it is now.

    Args:
        environment: who this machine is in the job.
        num_processes: of this machine.
        num_nodes: machines; the program is started once on each.
    """

    reruns_program = True
    endings: ClassVar = {"popen": ("",)}

    @classmethod
    def register_launchers(cls, launcher_registry: Registry[Launcher]) -> None:
        launcher_registry.register("popen", cls)

    @classmethod
    def for_job(
        cls,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        devices: Sequence[torch.device],
        **options: Any,
    ) -> Launcher:
        """An instance; in a process that one has started, whatever an environment of the user's says, none is: each
        rank would start others, without end.
        """
        if was_started():
            return ExternalLauncher()
        return super().for_job(environment, num_processes, num_nodes, devices, **options)

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Start, wait, and end this process.

        Raises:
            ConfigurationError: there is no command that would run this program again.
            SystemExit: always, with the job's exit code: 0; that of the process that failed first, 128 + n for a signal
                n; 1 after Ctrl-C; 128 + n if this process was sent another signal n.
        """
        command = command_again()
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
        from torch.distributed.elastic.multiprocessing.api import SubprocessContext

        variables = variables_of(self.environment, self.num_processes, self.num_nodes)
        sys.stdout.flush()
        with tempfile.TemporaryDirectory(prefix="drivetrain-", ignore_cleanup_errors=True) as folder:
            with _within(_directory()):
                job = start_processes(
                    name="drivetrain",
                    entrypoint=command[0],
                    args={rank: tuple(command[1:]) for rank in range(self.num_processes)},
                    envs=dict(enumerate({**each, LAUNCHER: str(os.getpid())} for each in variables)),
                    logs_specs=DefaultLogsSpecs(log_dir=folder),
                )
            assert isinstance(job, SubprocessContext)  # it is, for a command
            try:
                first = _first_failure([each.proc for each in job.subprocess_handlers.values()])
                result = job.wait(period=_POLL_S)  # ends those that still run
            except SignalException as ended:
                job.close(ended.sigval, _GRACE_S)
                sys.exit(1 if ended.sigval == signal.SIGINT else 128 + ended.sigval)
            finally:
                job.close(timeout=_GRACE_S)
        failures = {} if result is None else result.failures
        if not failures:
            sys.exit(0)
        code = first or min(failures.values(), key=lambda failure: failure.timestamp).exitcode
        sys.exit(code if code >= 0 else 128 - code)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or one has failed and the others had time to print why they fail too.

    The process that failed first need not end first: the others lose their connection to it while it still prints its
    traceback, and ending it then would cost the lines that matter.

    Returns: the exit code of the one that ended first with another code than 0; 0: none did.
    """
    first, ends_by = 0, math.inf
    while True:
        codes = [process.poll() for process in processes]
        if not first and any(codes):
            first, ends_by = next(code for code in codes if code), time.monotonic() + _LAST_WORDS_S
        if None not in codes or time.monotonic() >= ends_by:
            return first
        time.sleep(_POLL_S)


def was_started() -> bool:
    """Whether a launcher of this kind has started this very process; its children inherit the variable."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def end_with_launcher() -> None:
    """Let this process end when the one that supervises it is killed: no process is left (on Linux)."""
    if sys.platform != "linux" or not was_started():
        return
    launcher = os.environ[LAUNCHER]
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    if os.getppid() != int(launcher):  # it went meanwhile
        sys.exit(128 + signal.SIGTERM)


def command_again() -> list[str]:
    """The command that runs this program again, to be started where it was started.

    Raises:
        ConfigurationError: it has none, or it would run another program that this one is part of.
    """
    host = _host()
    if host is not None:
        name, instead = host
        raise ConfigurationError(
            f"To start the processes as copies of the program's command would run {name} again in each of them. "
            f"Write strategy={instead}."
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _host() -> tuple[str, str] | None:
    """What runs this program, where it is no command of its own; and the strategy to use there."""
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
    """Where this program was started, also if it has gone elsewhere since."""
    main = sys.modules.get("__main__")
    path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if path is None:
        return STARTED_IN
    if spec is not None:  # python -m: Python looks in the working directory first
        root = str(Path(path).parents[spec.name.count(".")])
        return root if root == sys.path[0] else STARTED_IN
    for argument in map(
        os.path.normpath, sys.orig_argv[1:]
    ):  # a script's path is absolute in __main__, as of the start
        if not os.path.isabs(argument) and path.endswith(f"{os.sep}{argument}"):
            return str(path.removesuffix(f"{os.sep}{argument}"))
    return STARTED_IN


@contextmanager
def _within(directory: str) -> Iterator[None]:
    """A block in which the working directory is another."""
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
