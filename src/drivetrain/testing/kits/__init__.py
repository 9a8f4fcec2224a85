"""One file for each kind of part, with its checks: see :mod:`drivetrain.testing.checks`."""
