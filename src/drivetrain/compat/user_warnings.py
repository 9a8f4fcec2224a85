"""``utilities.warnings``: a category for filters in programs. drivetrain's own warnings are plain UserWarnings."""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """A warning about something that may be intended."""


def disable_possible_user_warnings(module: str = "") -> None:
    """From now on, ignore every :class:`PossibleUserWarning` from modules matching ``module``."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
