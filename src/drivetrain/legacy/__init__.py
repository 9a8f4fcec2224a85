"""Programs of earlier generations: thin adapters onto today's Trainer, strategies and precisions.

An accelerator of an earlier generation is an object that the Trainer does not know. The Trainer asks it for
``as_settings()``, a dictionary of today's arguments. Nothing outside of this folder imports from it.
"""
