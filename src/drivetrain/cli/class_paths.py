"""Create the optimizers and schedulers that a configuration describes by class path and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.errors import ConfigurationError, shown

OptimizerCallable = Callable[[Iterable[nn.Parameter]], Optimizer]
"""The type of a module's argument that is called with parameters and returns an optimizer. The command line passes a
class path for it.
"""

LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
"""The type of a module's argument that is called with an optimizer and returns a scheduler. The command line passes a
class path for it.
"""


class ReduceLROnPlateau(lr_scheduler.ReduceLROnPlateau):
    """torch's ``ReduceLROnPlateau`` with the argument ``monitor``, so that the command line can set it.

    Args:
        optimizer: the optimizer whose learning rates the scheduler reduces.
        monitor: the name of the value, as logged with ``self.log``.
        args, kwargs: the other arguments of torch's scheduler, such as ``mode``.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


def class_at(path: str) -> Any:
    """Return the class at ``"package.module.Class"``.

    Raises:
        ConfigurationError: the class does not exist.
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
        args: the positional arguments as a tuple, or a single positional argument.
        init: ``{"class_path": "package.module.Class", "init_args": {...}}``; ``init_args`` may be missing.

    Raises:
        ConfigurationError: there is no "class_path", or no class at this path.
    """
    if "class_path" not in init:
        raise ConfigurationError(
            f"instantiate_class got {shown(init)}, which names no class. "
            'Write {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}.'
        )
    positional = args if isinstance(args, tuple) else (args,)
    return class_at(init["class_path"])(*positional, **(init.get("init_args") or {}))


class Recipe:
    """The entry in a configuration from which an optimizer or a scheduler is created.

    Args:
        offered: the class whose arguments are in ``value``; or, if ``value`` names a class, a tuple of allowed base
            classes.
        value: the entry in the configuration.
    """

    def __init__(self, offered: type | tuple[type, ...], value: Any) -> None:
        self._offered = offered
        self._arguments: dict[str, Any] = value.as_dict()

    def make(self, of: Any) -> Any:
        """Return the optimizer for the parameters ``of``, or the scheduler for the optimizer ``of``."""
        if isinstance(self._offered, tuple):
            return instantiate_class((of,), self._arguments)
        return self._offered(of, **self._arguments)

    def described(self) -> dict[str, Any]:
        """Return the configuration as an argument of :func:`instantiate_class`."""
        if isinstance(self._offered, tuple):
            return self._arguments
        return {
            "class_path": f"{self._offered.__module__}.{self._offered.__qualname__}",
            "init_args": self._arguments,
        }
