# The public names, for type checkers and for base/lazy.py.

from drivetrain.profilers.advanced import AdvancedProfiler as AdvancedProfiler
from drivetrain.profilers.memory import MemoryProfiler as MemoryProfiler
from drivetrain.profilers.passthrough import PassThroughProfiler as PassThroughProfiler
from drivetrain.profilers.profiler import Profiler as Profiler
from drivetrain.profilers.profiler import ProfilerRegistry as ProfilerRegistry
from drivetrain.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
from drivetrain.profilers.simple import SimpleProfiler as SimpleProfiler
from drivetrain.profilers.xla import XLAProfiler as XLAProfiler
