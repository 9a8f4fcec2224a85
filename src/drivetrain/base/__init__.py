"""Helpers that two or more folders use. These helpers import only torch, the standard library and drivetrain."""

from drivetrain.base.lazy import lazy

lazy(__name__)

VERSION = "0.1.0"
"""The version of drivetrain."""
