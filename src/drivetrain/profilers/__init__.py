"""Profilers: where the time and the memory of a run go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.profilers.advanced import AdvancedProfiler
    from drivetrain.profilers.memory import MemoryProfiler
    from drivetrain.profilers.passthrough import PassThroughProfiler
    from drivetrain.profilers.profiler import Profiler, ProfilerRegistry
    from drivetrain.profilers.pytorch import PyTorchProfiler
    from drivetrain.profilers.simple import SimpleProfiler
    from drivetrain.profilers.xla import XLAProfiler

__all__ = [
    "AdvancedProfiler", "MemoryProfiler", "PassThroughProfiler", "Profiler", "ProfilerRegistry", "PyTorchProfiler",
    "SimpleProfiler", "XLAProfiler",
]  # fmt: skip

_FILES = {
    "AdvancedProfiler": "advanced",
    "MemoryProfiler": "memory",
    "PassThroughProfiler": "passthrough",
    "Profiler": "profiler",
    "ProfilerRegistry": "profiler",
    "PyTorchProfiler": "pytorch",
    "SimpleProfiler": "simple",
    "XLAProfiler": "xla",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of these
    __getattr__, __dir__ = lazy(__name__, _FILES)
