"""The command ``drivetrain advise``: tries changes that may make a program faster, and reports those that help."""

from __future__ import annotations

NAMES = ("num_workers", "tensors", "pin_memory", "persistent_workers", "batch_size", "compile", "optimizer_kernels")
"""The names of the cures, the changes of a program to try. A name is the argument to change; but ``tensors`` means to
keep the data set in memory as tensors.
"""

VARIABLE = "DRIVETRAIN_TRIAL"
"""The environment variable with the arguments of :class:`Trial`, as JSON."""
