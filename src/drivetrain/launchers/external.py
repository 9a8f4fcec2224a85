"""The launcher for processes that torchrun, a cluster or another program has already started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.launchers.launcher import Launcher


class ExternalLauncher(Launcher):
    """Calls the function in this process, which is already a rank."""

    is_external = True
    is_interactive_compatible = True

    def __init__(self) -> None:
        """Take no arguments, because the launcher starts no processes."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)
