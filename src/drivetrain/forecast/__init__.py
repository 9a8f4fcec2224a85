"""The command ``drivetrain plan``: what a run will need, computed on fake tensors without its hardware."""
