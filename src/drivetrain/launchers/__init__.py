"""How the processes of a job start: one file per way."""

from drivetrain.launchers.external import ExternalLauncher
from drivetrain.launchers.launcher import Launcher, LaunchError
from drivetrain.launchers.multiprocessing import MultiProcessingLauncher

__all__ = ["ExternalLauncher", "LaunchError", "Launcher", "MultiProcessingLauncher"]
