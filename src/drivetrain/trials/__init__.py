"""The command ``drivetrain advise``: tries changes that can make a program faster, and reports the changes that
help.
"""

from __future__ import annotations

NAMES = ("num_workers", "tensors", "pin_memory", "persistent_workers", "batch_size", "compile", "optimizer_kernels")
"""The names of the cures: changes of a program to try. Each name is the argument to change, except ``tensors``: this
cure keeps the data set in memory as tensors.
"""

VARIABLE = "DRIVETRAIN_TRIAL"
"""The environment variable with the arguments of :class:`Trial`, as JSON."""
