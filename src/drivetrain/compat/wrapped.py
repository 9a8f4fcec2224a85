"""``fabric.wrappers``: whether something comes from :meth:`drivetrain.Engine.setup`."""

from __future__ import annotations

from drivetrain.engine.wrappers import EngineLoader, EngineModule, OptimizerHandle


def is_wrapped(obj: object) -> bool:
    """Return whether ``obj`` is a module, an optimizer or a loader as the set-up methods return it."""
    return issubclass(type(obj), (EngineModule, OptimizerHandle, EngineLoader))
