"""Profilers: measure the time and the memory of a run."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from drivetrain.profilers.memory import MemoryProfiler as MemoryProfiler
    from drivetrain.profilers.passthrough import PassThroughProfiler as PassThroughProfiler
    from drivetrain.profilers.profiler import Profiler as Profiler
    from drivetrain.profilers.profiler import ProfilerRegistry as ProfilerRegistry
    from drivetrain.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from drivetrain.profilers.simple import SimpleProfiler as SimpleProfiler
    from drivetrain.profilers.xla import XLAProfiler as XLAProfiler
