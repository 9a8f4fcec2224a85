"""Optimizers and schedulers that a configuration describes: by class path and arguments, or as a callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.errors import ConfigurationError, shown

OptimizerCallable = Callable[[Iterable[nn.Parameter]], Optimizer]
"""For an argument of a module: what makes an optimizer of parameters. On the command line a class path."""

LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
"""The same for what makes a scheduler of an optimizer."""


class ReduceLROnPlateau(lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler of this name, with the name of the logged value it watches.

    Args:
        optimizer: whose learning rates it reduces.
        monitor: the name of the value, as it was given to ``self.log``.
        args, kwargs: torch's own arguments, from ``mode`` on.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


def class_at(path: str) -> Any:
    """Return the class at ``"package.module.Class"``.

    Raises:
        ConfigurationError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"There is no class at the path {path!r}: {error}. Write the module and the name, such as torch.optim.SGD."
        ) from error


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Return an object of the class that ``init`` describes.

    Args:
        args: a tuple of positional arguments, or the only one.
        init: ``{"class_path": "package.module.Class", "init_args": {...}}``; ``init_args`` may be missing.

    Raises:
        ConfigurationError: there is no "class_path", or no class there.
    """
    if "class_path" not in init:
        raise ConfigurationError(
            f"instantiate_class got {shown(init)}, which names no class. "
            'Write {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}.'
        )
    positional = args if isinstance(args, tuple) else (args,)
    return class_at(init["class_path"])(*positional, **(init.get("init_args") or {}))


class Recipe:
    """How one optimizer or scheduler is made, as a run's configuration says it.

    Args:
        offered: the class whose arguments the configuration holds, or the base classes of the one that it names.
        value: what the configuration holds.
    """

    def __init__(self, offered: type | tuple[type, ...], value: Any) -> None:
        self._offered = offered
        self._arguments: dict[str, Any] = value.as_dict()

    def make(self, of: Any) -> Any:
        """Return the optimizer of the parameters ``of``, or the scheduler of the optimizer ``of``."""
        if isinstance(self._offered, tuple):
            return instantiate_class((of,), self._arguments)
        return self._offered(of, **self._arguments)

    def described(self) -> dict[str, Any]:
        """Return what :func:`instantiate_class` takes."""
        if isinstance(self._offered, tuple):
            return self._arguments
        return {
            "class_path": f"{self._offered.__module__}.{self._offered.__qualname__}",
            "init_args": self._arguments,
        }
