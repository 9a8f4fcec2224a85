"""Prove that a program resumes exactly: run it undisturbed and killed, and compare the two runs step by step."""

from drivetrain.base.lazy import lazy

lazy(__name__)
