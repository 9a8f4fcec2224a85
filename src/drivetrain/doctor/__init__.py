"""The command ``drivetrain doctor``: checks this machine and its torch, before a training depends on them.

Each file is one group of checks; command.py has their table. A check yields findings and facts.
"""
