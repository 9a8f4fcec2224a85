"""The Tuner of the 1.3 generation: the present Tuner with earlier arguments."""

from __future__ import annotations

from typing import Any

from drivetrain import tuner

_LR_FIND = ("min_lr", "max_lr", "num_training", "mode", "early_stop_threshold", "update_attr")
_SCALE_BATCH_SIZE = ("mode", "steps_per_trial", "init_val", "max_trials", "batch_arg_name")
"""Arguments in the order of that time, after the model and its data; their defaults are today's."""


class Tuner(tuner.Tuner):
    """Finds learning rates and batch sizes; ``lr_find`` only sets the attribute with ``update_attr``."""

    def lr_find(  # type: ignore[override]
        self,
        model: Any,
        train_dataloader: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Train with growing learning rates, and return the losses.

        ``args`` are ``min_lr``, ``max_lr``, ``num_training``, ``mode``, ``early_stop_threshold`` and ``update_attr``;
        ``more`` are these by name, and arguments of the present Tuner.
        """
        given = {"update_attr": False, **dict(zip(_LR_FIND, args, strict=False)), **more}
        loader = given.pop("train_dataloaders", train_dataloader)
        return super().lr_find(model, loader, val_dataloaders, datamodule=datamodule, **given)

    def scale_batch_size(  # type: ignore[override]
        self,
        model: Any,
        train_dataloader: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Find the largest batch size that fits, and set it.

        ``args`` are ``mode``, ``steps_per_trial``, ``init_val``, ``max_trials`` and ``batch_arg_name``; ``more`` are
        these by name, and arguments of the present Tuner.
        """
        given = {"margin": 0, **dict(zip(_SCALE_BATCH_SIZE, args, strict=False)), **more}
        loader = given.pop("train_dataloaders", train_dataloader)
        return super().scale_batch_size(model, loader, val_dataloaders, datamodule=datamodule, **given)
