"""The command ``drivetrain advise``: try changes that may make a program faster, and report those that do."""

from __future__ import annotations

NAMES = ("num_workers", "tensors", "pin_memory", "persistent_workers", "batch_size", "compile", "optimizer_kernels")
"""The cures, which are changes to try. Each has the name of the argument that it changes, except ``tensors``, which
holds the data set in memory as tensors."""

VARIABLE = "DRIVETRAIN_TRIAL"
"""The environment variable with the arguments of :class:`Trial`, as JSON."""
