"""How the processes of a job are started: one file per launcher."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.launchers.external import ExternalLauncher as ExternalLauncher
    from drivetrain.launchers.launcher import Launcher as Launcher
    from drivetrain.launchers.launcher import LauncherRegistry as LauncherRegistry
    from drivetrain.launchers.launcher import LaunchError as LaunchError
    from drivetrain.launchers.multiprocessing import MultiProcessingLauncher as MultiProcessingLauncher
    from drivetrain.launchers.ray import RayLauncher as RayLauncher
    from drivetrain.launchers.script import ScriptLauncher as ScriptLauncher
    from drivetrain.launchers.xla import XLALauncher as XLALauncher
