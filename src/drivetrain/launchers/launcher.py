"""The contract of a launcher: how the processes of one machine start, and how their work comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from drivetrain.errors import DrivetrainError


class Launcher(ABC):
    """Runs a function once in each process of this machine."""

    is_external: bool = False
    """Whether somebody else has started the processes: then this one is a rank, else it starts them and waits."""

    is_interactive_compatible: bool = False
    """Whether it works in a notebook, where the program is no file that could be run anew."""

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
