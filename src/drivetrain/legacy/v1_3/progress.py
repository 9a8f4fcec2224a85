"""Progress bars of Lightning 1.3, which count batches, and whose hooks have more arguments than drivetrain's."""

from __future__ import annotations

from typing import Any

import drivetrain.callback
import drivetrain.callbacks
from drivetrain.base.introspect import reads
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.defaults import set_defaults


class _Counts(drivetrain.callbacks.ProgressBar):
    """The hooks and counters of progress bars in Lightning 1.3."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, hooks.OF_CALLBACKS)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any, *outputs: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)

    @property
    def train_batch_idx(self) -> int:
        """The number of the epoch's training batches so far, including the batch that is running."""
        return self.trainer.progress.batch_idx + 1

    @property
    def val_batch_idx(self) -> int:
        """The number of the evaluation's batches so far, including the running one. ``test_batch_idx`` and
        ``predict_batch_idx`` are the same property.
        """
        return self.trainer.progress.eval_batch_idx + 1

    test_batch_idx = predict_batch_idx = val_batch_idx


set_defaults(
    _Counts,
    drivetrain.callback.Callback,
    {*hooks.GONE_FROM_CALLBACKS, *hooks.OF_CALLBACKS} - {"on_train_epoch_end"},
)


class ProgressBarBase(_Counts):
    """The base class of a user's own progress bar."""


class ProgressBar(_Counts, drivetrain.callbacks.TQDMProgressBar):
    """The tqdm bar; its ``main_progress_bar`` is the bar of training."""

    main_progress_bar: Any = reads("train_progress_bar", "The bar of training.")
