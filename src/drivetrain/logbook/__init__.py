"""The values of ``self.log``."""

from __future__ import annotations

from drivetrain.base.lazy import public

with public(__name__):
    from drivetrain.logbook.logbook import Logbook as Logbook
