"""What becomes of an override of each member that loggers have in the field; see :mod:`drivetrain.base.members`."""

from __future__ import annotations

from drivetrain.base.members import Members

CALLED = frozenset(
    {
        "__init__", "name", "version", "save_dir", "log_dir", "group_separator", "log_metrics", "log_hyperparams",
        "log_graph", "save", "finalize", "after_save_checkpoint",
    }
)  # fmt: skip
"""Members whose override is called, or read."""

FOR_USERS = frozenset({"experiment", "root_dir"})
"""Members that only programs and the loggers themselves read, in the field as here."""

MEMBERS = Members("logger", CALLED | FOR_USERS)
