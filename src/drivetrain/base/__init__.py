"""What two or more folders use. It needs torch and the standard library only."""

from __future__ import annotations
