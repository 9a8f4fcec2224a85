"""Helpers that two or more folders use. Importing one of them imports no package other than torch, the standard library
and drivetrain.
"""

from drivetrain.base.lazy import lazy

lazy(__name__)

VERSION = "0.1.0"
"""The version of drivetrain."""
