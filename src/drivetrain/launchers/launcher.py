"""The contract of a launcher, which starts the processes of one machine and returns their result."""

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
"""The environment variable with the id of the process that has started this rank with "popen" and supervises it."""

STARTED_IN = os.getcwd()
"""The working directory at the time when this file was imported, because a script may change it later."""

_LOOPBACK = (DEFAULT_ADDRESS, "localhost", "::1")


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. A program that only imports the packages of notebooks is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and ("ipykernel" in sys.modules or "google.colab" in sys.modules)


def was_started() -> bool:
    """Whether this program has started this process as a rank: then ``LAUNCHER`` contains the id of the parent process.

    The rank's own children inherit the variable, but have another parent.
    """
    return os.environ.get(LAUNCHER) == str(os.getppid())


class Launcher(ABC):
    """Runs a function once in each process of this machine.

    A new launcher is a file in this folder, or in a package, with one subclass. The subclass registers names in
    :meth:`register_launchers`, and each name is a value of a strategy's ``start_method``.

    Args:
        environment: provides the machine's node rank, and the main address and port.
        num_processes: the number of processes on this machine.
        num_nodes: the number of machines.
    """

    is_external: bool = False
    """Whether the processes were started by a cluster or another launcher; otherwise, this process starts them and
    waits.
    """

    is_interactive_compatible: bool = False
    """Whether the launcher works in a notebook, which is not a file that could be run again."""

    reruns_program: bool = False
    """Whether each process runs the whole program instead of the function: ``launch`` then never returns.

    A job with one process runs in this process, without a launch.
    """

    leaves_one_here: bool = False
    """Whether a job with one process runs in this process, without a launch."""

    stop_timeout_s: float = 600.0
    """Seconds for the processes to save and end after a signal: ``Trainer(stop_timeout_s=...)``."""

    scheduler: ClassVar[str | None] = None
    """The name of the system that chooses the job's machines and devices; ``None``: the user's arguments choose
    them.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For each name of this launcher, the suffixes of strategies' names that select the launcher. For a name without an
    entry, the name itself is the suffix.

    ``strategy="ddp_ray"`` has the suffix "ray". "ddp" has the suffix "".
    """

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes

    @classmethod
    def register_launchers(cls, launcher_registry: Registry[Launcher]) -> None:
        """Register the class under its names: ``launcher_registry.register("name", cls, description="...")``.

        A subclass that defines this method is registered when Python executes its ``class`` statement; no call is
        needed. Further arguments of ``register`` are passed to the constructor.
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
        """Return the launcher of a job: an instance of this class, or of another class if it fits the job better.

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
        """Call ``function(*args, **kwargs)`` in every process; return the result of this machine's first process.

        When this method raises an exception, all processes of this machine have ended.

        Raises:
            LaunchError: a process failed.
        """


class _Launchers(Registry[Launcher]):
    def check_arguments(self, start: str, cls: type[Launcher], init_params: Mapping[str, Any]) -> None:
        # a class with its own for_job may have a constructor with any arguments
        if next(owner for owner in cls.__mro__ if "for_job" in vars(owner)) is Launcher:
            super().check_arguments(start, cls, init_params)

    def endings(self, installed: bool) -> dict[str, str]:
        """Return, by suffix of strategy names, the start method that the suffix selects, without importing a package.

        If drivetrain's own launcher and another have the same suffix, the suffix selects drivetrain's.

        Args:
            installed: whether to include launchers of installed packages that were not used yet.
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
        """Return the launcher with this name; ``owner`` is the caller's name in the message.

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
"""The launchers by start method: launchers in the files of this folder, of users, and of installed packages."""


class LaunchError(DrivetrainError):
    """A process failed, and the job with it. If that process raised an exception, this exception is the ``__cause__``.

    Attributes:
        rank: global rank of the process that failed first.
        exit_code: the exit code of that process; ``-n`` means signal n.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.exit_code)


def variables_of(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> Iterator[dict[str, str]]:
    """Yield, for each process of this machine, the environment variables with its rank.

    They include ``OMP_NUM_THREADS``, the process's share of the processors, unless the user has set this variable. If
    all processes are on one machine, they meet at a loopback address, even if ``MASTER_ADDR`` is still set from an
    earlier job on several machines.
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
    """Return each process's share of the processors; ``None`` if the user has set ``OMP_NUM_THREADS``."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // num_processes)
