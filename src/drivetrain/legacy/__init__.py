"""Runs programs written for Lightning 1.1 or 1.3 (the earlier generations) with drivetrain's Trainer, strategies and
precisions.

An accelerator of an earlier generation has a method ``as_settings()``. The Trainer calls this method, which returns a
dictionary of drivetrain's arguments. Code outside this folder never imports from this folder.
"""
