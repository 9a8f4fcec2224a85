"""Profilers: where the time of a run goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.profilers.xla import XLAProfiler as XLAProfiler
_MODULES = {"XLAProfiler": "xla"}
__all__ = ["XLAProfiler"]

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _MODULES)
