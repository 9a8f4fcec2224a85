"""The record ``run.json`` of a run, and the command ``drivetrain report``. The command shows a run as one HTML page."""
