"""What becomes of an override of each member that launchers have in the field; see :mod:`drivetrain.base.members`."""

from __future__ import annotations

from drivetrain.base.members import Members

MEMBERS = Members(
    "launcher",
    called=frozenset({"__init__", "launch", "is_interactive_compatible"}),
    refused={"kill": "End the processes inside launch(), which gets the KeyboardInterrupt."},
)
