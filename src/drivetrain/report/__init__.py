"""What a run was: its record ``run.json``, and the command ``drivetrain report``, which shows it as one HTML page."""
