"""``trainer.model`` as in Lightning 1.1: a wrapper around the module that also runs the module's steps."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

_STEPS = ("training_step", "validation_step", "test_step")


class _RunsSteps:
    """Mixin for the classes of wrappers around a module.

    While an accelerator runs a step, a call of the wrapper runs the module's step.

    The wrapper also has a method for each of the module's steps. In both cases, the module's step runs inside the
    wrapper's forward pass.
    """

    strategy_of_run: Any

    def __getattr__(self, name: str) -> Any:
        if name in _STEPS:
            return functools.partial(self.strategy_of_run.run_module, name)
        return super().__getattr__(name)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self.strategy_of_run
        if strategy.asked is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return strategy.run_module(strategy.asked, *args, **kwargs)


class Plain(nn.Module):
    """A wrapper whose forward pass only calls the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def that_runs_steps(wrapped: nn.Module, module: nn.Module, strategy: Any) -> nn.Module:
    """Return ``wrapped`` with the ability to run the steps of ``module``. If ``wrapped`` is ``module`` itself, return a
    new wrapper.
    """
    if wrapped is module:
        wrapped = Plain(module)
    wrapper: Any = type(wrapped)
    if not issubclass(wrapper, _RunsSteps):
        wrapped.__class__ = _class_of(wrapper)
    wrapped.strategy_of_run = strategy
    return wrapped


@functools.cache
def _class_of(wrapper: Any) -> Any:
    return type(wrapper.__name__, (_RunsSteps, wrapper), {"__module__": wrapper.__module__})
