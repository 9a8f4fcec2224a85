"""Lightning's ``utilities.warnings``: a category of warnings that programs filter. Outside drivetrain.compat,
drivetrain's warnings have other categories.
"""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """A warning about something that the user may intend."""


def disable_possible_user_warnings(module: str = "") -> None:
    """From now on, ignore every :class:`PossibleUserWarning` from modules matching ``module``."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
