"""Profilers: measure the time and the memory of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from drivetrain.profilers.memory import MemoryProfiler as MemoryProfiler
    from drivetrain.profilers.passthrough import PassThroughProfiler as PassThroughProfiler
    from drivetrain.profilers.profiler import Profiler as Profiler
    from drivetrain.profilers.profiler import ProfilerRegistry as ProfilerRegistry
    from drivetrain.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from drivetrain.profilers.simple import SimpleProfiler as SimpleProfiler
    from drivetrain.profilers.xla import XLAProfiler as XLAProfiler


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
__all__ = list(_FILES)

lazy(__name__, _FILES)
