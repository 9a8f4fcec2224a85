"""Processes that torchrun, a cluster or another launcher has started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain.launchers.launcher import Launcher


class ExternalLauncher(Launcher):
    """Calls the function: this process is already a rank. Exceptions are not changed."""

    is_external = True
    is_interactive_compatible = True

    def __init__(self) -> None:
        """The launcher starts nothing, so it needs no arguments."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)
