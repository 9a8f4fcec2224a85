"""Warnings about programs that train, but probably not as intended.

Each class observes one concern of a run. The hook table calls an observer after all callbacks, the module and the
strategy, under the names of hooks and of the phases that :class:`drivetrain.module.hooks.HookTable` lists. Observers do
not run in a step, and the loops do not refer to them.
"""

from drivetrain.base.lazy import lazy

lazy(__name__)
