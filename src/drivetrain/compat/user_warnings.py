"""Lightning's ``utilities.warnings``: a category of warnings that programs filter. Outside drivetrain.compat,
drivetrain's warnings have other categories.
"""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """A warning about code that is possibly a mistake, and possibly intended."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Add a filter that ignores every :class:`PossibleUserWarning` from modules that match ``module``."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
