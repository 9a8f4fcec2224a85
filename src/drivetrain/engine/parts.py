"""Create an Engine's parts (strategy, launcher, loggers) from its plan, and check user-defined parts."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import check_part, is_own_class
from drivetrain.base.rank_zero import rank_zero_warn, tell_rank
from drivetrain.base.registry import load
from drivetrain.base.tree import BLOCKING
from drivetrain.errors import ConfigurationError, UnloggableError, described
from drivetrain.launchers import external
from drivetrain.launchers.launcher import Launcher, LauncherRegistry, in_notebook
from drivetrain.plan import Plan
from drivetrain.strategies.strategy import Strategy


def for_engine(plan: Plan) -> Plan:
    """Return ``plan``. If the strategy was given by name, replace its class by the class that an Engine uses for this
    name.
    """
    given = plan.strategy
    if isinstance(given, Strategy) or given.cls.facts.engine_class is None:
        return plan
    return replace(plan, strategy=replace(given, cls=load(given.cls.facts.engine_class)))


def listed(given: Any) -> list[Any]:
    """Return one or more callbacks, loggers or plugins as a list."""
    if given is None or given is False:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def logger_of(given: Any) -> Any:
    """Return ``given``, or the logger with the name ``given``. Check that the result is a logger."""
    logger = load("drivetrain.loggers.logger:logger_named")(given, os.getcwd()) if isinstance(given, str) else given
    if isinstance(logger, type) or not callable(getattr(logger, "log_metrics", None)):
        raise ConfigurationError(
            f"Engine(loggers=...) got {described(logger)}. Pass a drivetrain.loggers.Logger, or a list of them."
        )
    check_part(type(logger))
    return logger


class NoLoggerError(ConfigurationError, IndexError):
    """An Engine has no logger. The error is also an IndexError, as for the first item of an empty list."""


def loggable(metrics: Mapping[str, Any]) -> Collection[Any]:
    """Return the values of ``metrics``. A NumPy array with one element becomes a number.

    Raises:
        UnloggableError: a value is a list of numbers, or a tensor or array whose number of elements is not one.
    """
    for name, value in metrics.items():
        is_list = isinstance(value, (list, tuple)) and all(isinstance(each, (Number, Tensor)) for each in value)
        count = math.prod(getattr(value, "shape", ())) if hasattr(value, "item") else 1  # NumPy's values have item()
        if is_list or count != 1:
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else described(value)
            raise UnloggableError(
                f"Engine.log({name!r}, ...) got {given}. Log one number per name: reduce it first, for example with "
                ".mean(), or log each value under a name of its own."
            )
    arrays = {key: each.item() for key, each in metrics.items() if hasattr(each, "item") and not torch.is_tensor(each)}
    return {**metrics, **arrays}.values()


def check_parts(plan: Plan) -> None:
    """Check the user-defined parts in a plan. The Engine calls this function before it changes a part.

    Raises:
        ConfigurationError: a part overrides a method that an Engine never calls.
    """
    given, cls = plan.strategy, plan.strategy_class
    if cls.facts.engine_verbs is None:
        check_part(cls)
    elif not is_own_class(cls):
        cls.facts.engine_verbs.check(cls)
    store = plan.checkpoint_io or (given.checkpoint_io if isinstance(given, Strategy) else None)
    for part in (plan.accelerator, plan.precision, plan.environment, store, plan.layer_sync):
        if part is not None:
            check_part(type(part))


def check_pair(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Warn if an optimizer that is set up with ``module`` has none of the module's parameters."""
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if own.isdisjoint(id(each) for group in optimizer.param_groups for each in group["params"]):
            rank_zero_warn(
                f"Engine.setup got a {type(optimizer).__name__} that has no parameter of the {type(module).__name__} "
                "it is set up with, so its steps do not train that module. Build the optimizer on "
                "model.parameters() of the same model."
            )


def strategy_of(plan: Plan) -> Strategy:
    """Return the user's strategy object, or create the strategy that the plan describes."""
    tell_rank()
    if isinstance(plan.strategy, Strategy):
        return plan.strategy
    strategy = plan.strategy.build()
    strategy.own_parts.accelerator, strategy.own_parts.precision = plan.accelerator, plan.precision
    return strategy


def bind_device(plan: Plan) -> None:
    """Pass the plan's device to the accelerator and the precision. Record whether copies to the device must block."""
    accelerator = plan.accelerator
    accelerator.first_device = plan.devices[0]
    plan.precision.device_type = accelerator.autocast_device_type
    if not accelerator.supports_non_blocking:
        BLOCKING.add(accelerator.first_device.type)


def launcher_of(plan: Plan) -> Launcher:
    """Return the launcher of a plan.

    Raises:
        ConfigurationError: a user-defined launcher does not work in a notebook, or overrides a method that is never
            called.
    """
    if plan.start_method is None:
        return external.ExternalLauncher()
    found = LauncherRegistry.entry(plan.start_method)
    check_part(found.cls)
    job = (plan.environment, plan.num_processes, plan.num_nodes, plan.devices)
    launcher = found.cls.for_job(*job, **found.init_params)
    if not (is_own_class(found.cls) or launcher.is_interactive_compatible) and in_notebook():
        raise ConfigurationError(
            f"{type(launcher).__name__} starts {plan.num_processes} processes in a way that does not work in a "
            'notebook, as its is_interactive_compatible says. Write strategy="ddp_notebook".'
        )
    return launcher
