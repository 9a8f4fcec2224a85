# The public names, for type checkers and for base/lazy.py.

from drivetrain.launchers.external import ExternalLauncher as ExternalLauncher
from drivetrain.launchers.launcher import Launcher as Launcher
from drivetrain.launchers.launcher import LauncherRegistry as LauncherRegistry
from drivetrain.launchers.launcher import LaunchError as LaunchError
from drivetrain.launchers.multiprocessing import MultiProcessingLauncher as MultiProcessingLauncher
from drivetrain.launchers.ray import RayLauncher as RayLauncher
from drivetrain.launchers.script import ScriptLauncher as ScriptLauncher
from drivetrain.launchers.xla import XLALauncher as XLALauncher
