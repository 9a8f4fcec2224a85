"""Prove that a program resumes exactly: run the program once undisturbed and once with kills, and compare the two runs
step by step.
"""

from drivetrain.base.lazy import lazy

lazy(__name__)
