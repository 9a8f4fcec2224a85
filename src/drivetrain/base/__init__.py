"""Helpers that two or more folders use. They import torch and the standard library only."""

from drivetrain.base.lazy import lazy

lazy(__name__)
