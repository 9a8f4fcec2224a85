"""The checks that :mod:`drivetrain.testing.checks` runs. Each kind of part has one file."""
