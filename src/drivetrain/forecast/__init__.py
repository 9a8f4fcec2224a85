"""The command ``drivetrain plan``: computes what a run will need, on fake tensors and without the run's hardware."""
