"""The command ``drivetrain plan``: compute the memory and the time that a run will need, without the run's hardware."""
