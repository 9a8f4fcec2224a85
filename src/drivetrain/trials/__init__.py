"""The command ``drivetrain advise``: try what may make a program faster, and report what does."""

from __future__ import annotations

NAMES = ("num_workers", "tensors", "pin_memory", "persistent_workers", "batch_size", "compile", "optimizer_kernels")
"""The cures: changes to try, named by the argument that each changes; ``tensors`` holds the data set in memory."""

VARIABLE = "DRIVETRAIN_TRIAL"
"""The environment variable with the arguments of :class:`Trial`, as JSON."""
