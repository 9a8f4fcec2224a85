"""The record ``run.json`` of a run, and the command ``drivetrain report``. The command describes a run on one HTML
page.
"""
