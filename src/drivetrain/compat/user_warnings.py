"""Lightning's ``utilities.warnings``: a category that programs filter. Other parts of drivetrain use other
categories.
"""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """A warning about code that may be a mistake, but may also be intended."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Add a filter that ignores every :class:`PossibleUserWarning` from modules that match ``module``."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
