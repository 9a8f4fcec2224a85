"""``fabric.wrappers``: what :meth:`drivetrain.Engine.setup` returns, told apart and taken out of its wrapper."""

from __future__ import annotations

from typing import Any

from drivetrain.base.tree import map_leaves
from drivetrain.engine.wrappers import EngineLoader, EngineModule, OptimizerHandle


def is_wrapped(obj: object) -> bool:
    """Return whether ``obj`` is a module, an optimizer or a loader as the set-up methods return it."""
    return issubclass(type(obj), (EngineModule, OptimizerHandle, EngineLoader))


def _unwrap_objects(collection: Any) -> Any:
    """Return ``collection``, an object or a tree of them, with the originals in the place of wrapped ones."""
    return map_leaves(_original, collection)


def _original(obj: Any) -> Any:
    if issubclass(type(obj), EngineModule):
        return obj.module
    if issubclass(type(obj), OptimizerHandle):
        return obj.optimizer
    return obj._loader if issubclass(type(obj), EngineLoader) else obj
