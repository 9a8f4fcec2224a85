"""The checks, in one file for each kind of part: see :mod:`drivetrain.testing.checks`."""
