"""Programs written for Lightning 1.1 or 1.3, the earlier generations: thin adapters onto drivetrain's Trainer,
strategies and precisions.

drivetrain's Trainer does not know the accelerators of earlier generations: it calls their method ``as_settings()``,
which returns a dictionary of drivetrain's arguments. No code outside this folder imports from this folder.
"""
