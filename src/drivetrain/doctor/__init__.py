"""The command ``drivetrain doctor``: checks this machine and the installed torch before a training.

Each file has a group of checks, and command.py lists them. A check yields findings, which are problems, and facts.
"""
