"""Lightning's ``trainer.call``: functions with which other libraries call a Trainer's hooks."""

from __future__ import annotations

from typing import Any

from drivetrain.callback import Checkpoint


def _call_callback_hooks(
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    """Call a hook of each callback with the Trainer, the module and ``args``.

    Args:
        trainer: the Trainer with the callbacks.
        hook_name: the hook.
        *args: the hook's arguments after the Trainer and the module.
        monitoring_callbacks: True calls only callbacks that monitor metrics or save checkpoints; False calls only the
            others; ``None`` calls all.
        **kwargs: the hook's keyword arguments.
    """
    scope = trainer.hooks.scope(hook_name)
    for callback in trainer.callbacks:
        monitors = callback.monitors or isinstance(callback, Checkpoint)
        if monitoring_callbacks is None or monitoring_callbacks == monitors:
            call = trainer.logbook.within(scope, getattr(callback, hook_name))
            call(trainer, trainer.lightning_module, *args, **kwargs)


def _call_lightning_module_hook(trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
    """Call a hook of ``pl_module``, by default the Trainer's module. ``self.log`` works as if the Trainer called the
    hook.
    """
    method = getattr(pl_module or trainer.lightning_module, hook_name)
    return trainer.logbook.within(trainer.hooks.scope(hook_name), method)(*args, **kwargs)


def _call_lightning_datamodule_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the datamodule.

    Raises:
        TypeError: there is no datamodule.
    """
    if trainer.datamodule is None:
        raise TypeError(f"There is no datamodule whose {hook_name} could be called. Pass one: datamodule=...")
    return getattr(trainer.datamodule, hook_name)(*args, **kwargs)


def _call_strategy_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the strategy. ``self.log`` works as in the hook ``hook_name``."""
    method = getattr(trainer.strategy, hook_name)
    return trainer.logbook.within(trainer.hooks.scope(hook_name), method)(*args, **kwargs)
