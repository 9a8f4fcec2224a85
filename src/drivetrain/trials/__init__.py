"""The command ``drivetrain advise``: try what may make a program faster, and report what does."""

from __future__ import annotations

NAMES = ("num_workers", "tensors", "pin_memory", "persistent_workers", "batch_size", "compile", "optimizer_kernels")
"""The cures, by the argument that each changes; ``tensors``: the data set is held in memory as tensors."""

VARIABLE = "DRIVETRAIN_TRIAL"
"""The environment variable with the JSON of a trial's :class:`Trial` arguments."""
