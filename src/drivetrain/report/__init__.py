"""The record ``run.json`` of a run, and the command ``drivetrain report``, which shows a run as one HTML page."""
