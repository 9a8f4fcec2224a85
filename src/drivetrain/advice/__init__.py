"""Warnings about programs that train, but probably not in the intended way.

The classes of this package are observers: each watches one aspect of a run. The methods of an observer have the names
of hooks, or of the phases that :class:`drivetrain.module.hooks.HookTable` lists. The hook table calls an observer's
method after the hooks of all callbacks, the module and the strategy. Observers are not called during a training step.
The loops do not refer to observers.
"""

from drivetrain.base.lazy import lazy

lazy(__name__)
