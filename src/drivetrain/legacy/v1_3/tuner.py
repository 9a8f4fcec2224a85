"""The Tuner of the 1.3 generation: today's, with the arguments of that time."""

from __future__ import annotations

from typing import Any

from drivetrain import tuner


class Tuner(tuner.Tuner):
    """Finds learning rates and batch sizes; ``lr_find`` sets no attribute unless it is told to."""

    def lr_find(  # type: ignore[override]
        self,
        model: Any,
        train_dataloader: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        min_lr: float = 1e-08,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = False,
        **more: Any,
    ) -> Any:
        """Train with growing learning rates, and return the losses; ``more`` are arguments of today's Tuner."""
        return super().lr_find(
            model,
            more.pop("train_dataloaders", train_dataloader),
            val_dataloaders,
            datamodule=datamodule,
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=num_training,
            mode=mode,
            early_stop_threshold=early_stop_threshold,
            update_attr=update_attr,
            **more,
        )

    def scale_batch_size(  # type: ignore[override]
        self,
        model: Any,
        train_dataloader: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        **more: Any,
    ) -> Any:
        """Find the largest batch size that fits, and set it; ``more`` are arguments of today's Tuner."""
        more.setdefault("margin", 0)
        return super().scale_batch_size(
            model,
            more.pop("train_dataloaders", train_dataloader),
            val_dataloaders,
            datamodule=datamodule,
            mode=mode,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            batch_arg_name=batch_arg_name,
            **more,
        )
