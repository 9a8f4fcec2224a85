"""Lightning's ``fabric.wrappers``: detect and unwrap objects that :meth:`drivetrain.Engine.setup` returns."""

from __future__ import annotations

from typing import Any

from drivetrain.base.tree import map_leaves
from drivetrain.engine.wrappers import EngineLoader, EngineModule, OptimizerHandle


def is_wrapped(obj: object) -> bool:
    """Return whether ``obj`` is a module, an optimizer or a loader that a method such as ``setup`` returned."""
    return issubclass(type(obj), (EngineModule, OptimizerHandle, EngineLoader))


def _unwrap_objects(collection: Any) -> Any:
    """Return ``collection``, with the original in place of each wrapped object."""
    return map_leaves(_original, collection)


def _original(obj: Any) -> Any:
    if issubclass(type(obj), EngineModule):
        return obj.module
    if issubclass(type(obj), OptimizerHandle):
        return obj.optimizer
    return obj._loader if issubclass(type(obj), EngineLoader) else obj
