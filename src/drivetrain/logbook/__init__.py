"""The values of ``self.log``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy

if TYPE_CHECKING:
    from drivetrain.logbook.logbook import Logbook as Logbook

_PUBLIC = {"Logbook": "logbook"}
__all__ = list(_PUBLIC)

if not TYPE_CHECKING:  # for a type checker, a module's __getattr__ would make every name valid
    __getattr__, __dir__ = lazy(__name__, _PUBLIC)
