"""Helpers that two or more folders use. They import torch and the standard library only."""

from drivetrain.base.lazy import lazy

lazy(__name__)

VERSION = "0.1.0"
"""The version of drivetrain."""
