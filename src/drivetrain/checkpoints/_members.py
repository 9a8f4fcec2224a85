"""What becomes of an override of each member that stores have in the field; see :mod:`drivetrain.base.members`."""

from __future__ import annotations

from drivetrain.base.members import Members

MEMBERS = Members(
    "checkpoint store",
    called=frozenset({"__init__", "save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"}),
)
