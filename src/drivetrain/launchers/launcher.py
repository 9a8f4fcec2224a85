"""The contract of a launcher: how the processes of one machine start, and how their work comes back."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from drivetrain.clusters.environment import ClusterEnvironment
from drivetrain.errors import DrivetrainError

LAUNCHER = "DRIVETRAIN_LAUNCHER"
"""The variable that tells a process which one supervises it, where that would not end it when it is killed itself."""

STARTED_IN = os.getcwd()
"""The working directory, before a script has changed it: this file is read when the Trainer is imported."""


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel; the packages of one may be imported anywhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and ("ipykernel" in sys.modules or "google.colab" in sys.modules)


class Launcher(ABC):
    """Runs a function once in each process of this machine."""

    is_external: bool = False
    """Whether somebody else has started the processes: then this one is a rank, else it starts them and waits."""

    is_interactive_compatible: bool = False
    """Whether it works in a notebook, where the program is no file that could be run anew."""

    reruns_program: bool = False
    """Whether each process runs the whole program and not the function: ``launch`` then never returns."""

    @abstractmethod
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` in every process; return what the first one of this machine returned.

        Raises:
            LaunchError: one of them failed.
        """


class LaunchError(DrivetrainError):
    """A process failed, and the job with it. Its own exception, where there was one, is the ``__cause__`` (trap T31).

    Attributes:
        rank: global rank of the process that failed first.
        exit_code: what it ended with; ``-n`` means signal n.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.exit_code)


def variables_of(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> Iterator[dict[str, str]]:
    """The environment variables that tell each process of this machine who it is (trap T45).

    ``OMP_NUM_THREADS``, each one's share of the processors, is among them where the user has not set it.
    """
    node, threads = environment.node_rank(), threads_each(num_processes)
    common = {
        "NODE_RANK": node,
        "WORLD_SIZE": num_processes * num_nodes,
        "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": environment.main_port,
    } | ({} if threads is None else {"OMP_NUM_THREADS": threads})
    for local_rank in range(num_processes):
        own = {"LOCAL_RANK": local_rank, "RANK": node * num_processes + local_rank}
        yield {name: str(value) for name, value in {**common, **own}.items()}


def threads_each(num_processes: int) -> int | None:
    """Each process's share of the processors; ``None`` where the user has decided."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // num_processes)
