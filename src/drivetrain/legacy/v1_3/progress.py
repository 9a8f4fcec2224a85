"""Progress bars of Lightning 1.3: the bars count batches, and have hooks with more arguments than drivetrain's
hooks.
"""

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
        """The number of training batches so far in this epoch, including the current batch."""
        return self.trainer.progress.batch_idx + 1

    @property
    def val_batch_idx(self) -> int:
        """The number of batches so far in this evaluation, including the current batch. ``test_batch_idx`` and
        ``predict_batch_idx`` are aliases of this property.
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
    """The tqdm bar; the attribute ``main_progress_bar`` is the bar for training."""

    main_progress_bar: Any = reads("train_progress_bar", "The bar of training.")
