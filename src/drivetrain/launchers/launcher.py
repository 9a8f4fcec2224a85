"""The contract of a launcher: start the processes of one machine, call a function in each, and return a result."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from drivetrain.base.introspect import is_own_class
from drivetrain.base.registry import Entry, Registry, names_itself
from drivetrain.clusters.environment import DEFAULT_ADDRESS, ClusterEnvironment
from drivetrain.errors import ConfigurationError, DrivetrainError, UnknownNameError, did_you_mean, shown

LAUNCHER = "DRIVETRAIN_LAUNCHER"
"""An environment variable that the launcher "popen" sets for ranks: the process id of the launching process."""

STARTED_IN = os.getcwd()
"""The working directory when this file was imported. A script may change the working directory later."""

_LOOPBACK = (DEFAULT_ADDRESS, "localhost", "::1")


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and ("ipykernel" in sys.modules or "google.colab" in sys.modules)


def was_started() -> bool:
    """Whether the launcher "popen" has started this process. ``LAUNCHER`` then contains the id of the parent process.

    Children of a rank inherit the variable, but their parent is the rank.
    """
    return os.environ.get(LAUNCHER) == str(os.getppid())


class Launcher(ABC):
    """Runs a function once in each process of this machine.

    To add a launcher, write a subclass in a file of this folder or of a package. The subclass registers names in
    :meth:`register_launchers`. Each name is a value for the argument ``start_method`` of strategies.

    Args:
        environment: provides the machine's node rank, and the main address and port.
        num_processes: the number of processes on this machine.
        num_nodes: the number of machines.
    """

    is_external: bool = False
    """Whether a cluster or another program has started the processes. If False, this process starts them and waits."""

    is_interactive_compatible: bool = False
    """Whether the launcher works in a notebook."""

    reruns_program: bool = False
    """Whether each process runs the whole program instead of the function. If True, ``launch`` never returns.

    A job with one process runs in this process, without a launch.
    """

    leaves_one_here: bool = False
    """Whether a job with one process runs in this process, without a launch."""

    stop_timeout_s: float = 600.0
    """After a signal, the processes have this many seconds to save and end. See ``Trainer(stop_timeout_s=...)``."""

    scheduler: ClassVar[str | None] = None
    """The name of the system that chooses the job's machines and devices, or ``None`` if the user's arguments choose
    them.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For each name of this launcher, the suffixes of strategies' names that select the launcher. By default, the
    suffix is the launcher's name.

    For example, ``strategy="ddp_ray"`` has the suffix "ray", and "ddp" has the suffix "".
    """

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes

    @classmethod
    def register_launchers(cls, launcher_registry: Registry[Launcher]) -> None:
        """Register the class under its names: ``launcher_registry.register("name", cls, description="...")``.

        Called when Python executes the ``class`` statement of a subclass. Further arguments of ``register`` are passed
        to the constructor.
        """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names_itself(cls, "register_launchers", LauncherRegistry)

    @classmethod
    def for_job(
        cls,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        devices: Sequence[torch.device],
        **options: Any,
    ) -> Launcher:
        """Return the launcher of a job. A subclass may return an instance of another class.

        Args:
            environment: provides the machine's node rank, and the main address and port.
            num_processes: the number of processes on this machine.
            num_nodes: the number of machines.
            devices: this machine's devices, one for each process.
            options: the arguments with which the class was registered.
        """
        return cls(environment, num_processes, num_nodes, **options)

    @abstractmethod
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` in every process. Return the result of the machine's local rank 0.

        When this method raises an exception, all processes of this machine have ended.

        Raises:
            LaunchError: a process failed.
        """


class _Launchers(Registry[Launcher]):
    def check_arguments(self, start: str, cls: type[Launcher], init_params: Mapping[str, Any]) -> None:
        # a class that overrides for_job may have a constructor with any arguments
        if next(owner for owner in cls.__mro__ if "for_job" in vars(owner)) is Launcher:
            super().check_arguments(start, cls, init_params)

    def endings(self, installed: bool) -> dict[str, str]:
        """Return a dictionary from suffixes of strategies' names to the start methods that they select. This method
        imports no package.

        If a launcher of drivetrain and another launcher have the same suffix, the suffix selects drivetrain's launcher.

        Args:
            installed: whether to include launchers of installed packages that are not imported yet.
        """
        found: dict[str, str] = {}
        self._files()
        for name in self.available() if installed else sorted(self._registered):
            known = self._registered.get(name)
            ours = known is not None and is_own_class(known.cls)
            for ending in (name,) if known is None else known.cls.endings.get(name, (name,)):
                if ours or ending not in found:
                    found[ending] = name
        return found

    def of(self, start_method: str, owner: str) -> Entry[Launcher]:
        """Return the launcher with this name. ``owner`` is the caller's name in the error message.

        Raises:
            ConfigurationError: the name is unknown.
        """
        if not isinstance(start_method, str):
            raise ConfigurationError(
                f"{owner}(start_method={shown(start_method)}): a start method is a name. Give the launcher's class "
                f"one in register_launchers, or write one of {', '.join(map(repr, self.available()))}."
            )
        try:
            return self.entry(start_method)
        except UnknownNameError:
            raise ConfigurationError(
                f"{owner}(start_method={start_method!r}): this start method is unknown. "
                f"{did_you_mean(str(start_method), self.available())}"
            ) from None


LauncherRegistry = _Launchers("drivetrain.launchers", "launcher", "launcher", by_file=False)
"""All launchers by start method: drivetrain's, the user's, and those of installed packages."""


class LaunchError(DrivetrainError):
    """A process failed, so the job ended. If the process raised an exception, the exception is the ``__cause__``.

    Attributes:
        rank: global rank of the process that failed first.
        exit_code: the exit code of that process. ``-n`` means that signal n ended it.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.exit_code)


def variables_of(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> Iterator[dict[str, str]]:
    """Yield the environment variables of each process on this machine, such as ``RANK``.

    If the user has not set ``OMP_NUM_THREADS``, its value becomes the process's share of the processors. If all
    processes are on one machine, ``MASTER_ADDR`` is a loopback address, even if the environment has the address of
    another machine.
    """
    node, threads = environment.node_rank(), threads_each(num_processes)
    address = environment.main_address
    if num_nodes == 1 and address not in _LOOPBACK:
        address = DEFAULT_ADDRESS
    common = {
        "NODE_RANK": node,
        "WORLD_SIZE": num_processes * num_nodes,
        "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.main_port,
    } | ({} if threads is None else {"OMP_NUM_THREADS": threads})
    for local_rank in range(num_processes):
        own = {"LOCAL_RANK": local_rank, "RANK": node * num_processes + local_rank}
        yield {name: str(value) for name, value in {**common, **own}.items()}


def threads_each(num_processes: int) -> int | None:
    """Return each process's share of the processors, or ``None`` if the user has set ``OMP_NUM_THREADS``."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // num_processes)
