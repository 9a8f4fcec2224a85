"""``utilities.warnings``: a category that programs filter by. drivetrain's own warnings are plain UserWarnings."""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """Of something that may be meant as it is."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore every :class:`PossibleUserWarning` that is issued in modules matching ``module``, from now on."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
