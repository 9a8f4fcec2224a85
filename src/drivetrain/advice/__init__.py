"""Warnings about programs that train, but probably not as intended.

The classes, called observers, each watch one aspect of a run. An observer has methods with the names of hooks, or of
phases that :class:`drivetrain.module.hooks.HookTable` lists. The hook table calls an observer's methods after the hooks
of all callbacks, the module and the strategy. Observers are not called during a training step, and the code of the
loops does not refer to them.
"""

from drivetrain.base.lazy import lazy

lazy(__name__)
