"""Progress bars of the 1.3 generation, whose hooks have further arguments and which count batches."""

from __future__ import annotations

from typing import Any

import drivetrain.callback
import drivetrain.callbacks
from drivetrain.base.introspect import reads
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.defaults import set_defaults


class _Counts(drivetrain.callbacks.ProgressBar):
    """The hooks and counters of that generation."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, hooks.OF_CALLBACKS)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any, *outputs: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)

    @property
    def train_batch_idx(self) -> int:
        """The number of batches of the epoch that were trained on, including the running one."""
        return self.trainer.progress.batch_idx + 1

    @property
    def val_batch_idx(self) -> int:
        """The number of processed batches of the evaluation; the next two properties return the same."""
        return self.trainer.progress.eval_batch_idx + 1

    test_batch_idx = predict_batch_idx = val_batch_idx


set_defaults(
    _Counts,
    drivetrain.callback.Callback,
    {*hooks.GONE_FROM_CALLBACKS, *hooks.OF_CALLBACKS} - {"on_train_epoch_end"},
)


class ProgressBarBase(_Counts):
    """The base of bars that draw themselves."""


class ProgressBar(_Counts, drivetrain.callbacks.TQDMProgressBar):
    """The tqdm bar; its ``main_progress_bar`` is the bar of training."""

    main_progress_bar: Any = reads("train_progress_bar", "The bar of training.")
