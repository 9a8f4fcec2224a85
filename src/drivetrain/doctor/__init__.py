"""The command ``drivetrain doctor``: checks this machine and the installed torch before a training.

Each file is one group of checks; command.py contains the table of groups. Each check yields findings (problems) and
facts.
"""
