"""The Tuner of Lightning 1.3: drivetrain's Tuner with Lightning 1.3's arguments."""

from __future__ import annotations

from typing import Any

from drivetrain import tuner


def _earlier(method: Any, *names: str, **defaults: Any) -> Any:
    def call(
        self: Tuner,
        model: Any,
        train_dataloader: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **more}
        loader = given.pop("train_dataloaders", train_dataloader)
        return method(self, model, loader, val_dataloaders, datamodule=datamodule, **given)

    call.__doc__ = f"""{method.__doc__.splitlines()[0]}

    ``args`` are {", ".join(names)};
    ``more`` are these by name, and arguments of the present Tuner.
    """
    return call


class Tuner(tuner.Tuner):
    """Finds learning rates and batch sizes; ``lr_find`` sets the model's attribute only with ``update_attr=True``.

    The arguments after the model and the data have Lightning 1.3's order, and drivetrain's defaults.
    """

    lr_find = _earlier(
        tuner.Tuner.lr_find, "min_lr", "max_lr", "num_training", "mode", "early_stop_threshold", "update_attr",
        update_attr=False,
    )  # fmt: skip
    scale_batch_size = _earlier(
        tuner.Tuner.scale_batch_size, "mode", "steps_per_trial", "init_val", "max_trials", "batch_arg_name", margin=0
    )
