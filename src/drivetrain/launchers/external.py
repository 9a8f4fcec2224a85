"""Somebody else has started the processes: torchrun, a cluster, or a launcher one level up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.launchers.launcher import Launcher


class ExternalLauncher(Launcher):
    """Calls the function: this process is a rank already. Its exceptions are its own."""

    is_external = True
    is_interactive_compatible = True

    def __init__(self) -> None:
        """Nothing is started, so nothing need be known."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)
