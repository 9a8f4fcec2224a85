"""The values of ``self.log``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.logbook.logbook import Logbook as Logbook

_PUBLIC = {"Logbook": "logbook"}
__all__ = list(_PUBLIC)

lazy(__name__, _PUBLIC)
