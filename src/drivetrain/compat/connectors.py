"""Names that libraries import from Lightning's ``trainer.connectors``, ``core.optimizer``, ``strategies.fsdp`` and
``utilities.registry``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

from drivetrain.compat.connector_views import AcceleratorView
from drivetrain.errors import NotSupportedError
from drivetrain.plan import resolve
from drivetrain.settings import Settings


class _AcceleratorConnector(AcceleratorView):
    """The accelerator, devices and so on that a Trainer with these arguments would use.

    The library scvi-tools reads them before it creates a Trainer.

    Args:
        devices, accelerator: as for the Trainer.
        arguments: other arguments of the Trainer.

    Raises:
        ConfigurationError: the accelerator or device does not exist.
    """

    def __init__(self, devices: Any = "auto", *, accelerator: Any = "auto", **arguments: Any) -> None:
        settings = Settings(accelerator=accelerator, devices=devices, **arguments)
        super().__init__(resolve(settings), settings)

    def _check_and_init_precision(self) -> Any:
        """Return the precision. The library nequip wraps this method. The Trainer does not call it."""
        return self.precision


def _register_classes(registry: Any, method: str, module: ModuleType, parent: type) -> None:
    """Call the class method ``method`` with ``registry``, for each subclass of ``parent`` in ``module`` that overrides
    it.
    """

    def function(cls: type) -> Any:
        bound = getattr(cls, method, None)
        return getattr(bound, "__func__", bound)

    for _, member in inspect.getmembers(module, inspect.isclass):
        if issubclass(member, parent) and function(member) not in (None, function(parent)):
            getattr(member, method)(registry)


class _MockOptimizer(torch.optim.Optimizer):
    """An optimizer for checking the arguments of a scheduler. It trains no model."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})
        self.param_groups = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``closure``."""
        return None if closure is None else closure()


def _get_full_state_dict_context(*_: Any, **__: Any) -> NoReturn:
    """Not supported: this function is for the wrappers of FSDP1, which drivetrain does not use."""
    raise _only_fsdp2("_get_full_state_dict_context", "trainer.strategy.lightning_module_state_dict()")


def _setup_activation_checkpointing(*_: Any, **__: Any) -> NoReturn:
    """Not supported: this function is for the wrappers of FSDP1, which drivetrain does not use."""
    raise _only_fsdp2("_setup_activation_checkpointing", "FSDPStrategy(activation_checkpointing_policy=...)")


def _only_fsdp2(name: str, instead: str) -> NotSupportedError:
    return NotSupportedError(
        f'drivetrain.compat: {name} is for FullyShardedDataParallel of torch (FSDP1), and strategy="fsdp" is FSDP2 '
        f"here. Write {instead}, or run the program with Lightning itself."
    )


def do_nothing_closure() -> None:
    """Do nothing. This is a closure for ``optimizer.step(closure)`` without a loss."""
