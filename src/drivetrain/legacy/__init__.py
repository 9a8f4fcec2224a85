"""Programs of earlier generations: thin adapters onto the present Trainer, strategies and precisions.

The Trainer does not know the accelerators of earlier generations. It calls their method ``as_settings()``, which
returns a dictionary of present arguments. Nothing outside this folder imports from it.
"""
