"""Write predictions to files after each batch, or at the end of a prediction."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, Literal

from drivetrain.base.introspect import missing_arguments, overrides
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, HookError, check_choice


class WriteInterval(str, Enum):
    """The times at which a prediction writer writes."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether predictions are written after each batch."""
        return "batch" in self.value

    @property
    def on_epoch(self) -> bool:
        """Whether predictions are written at the end of the epoch."""
        return "epoch" in self.value


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions.

    A subclass defines :meth:`write_on_batch_end`, :meth:`write_on_epoch_end` or both, as ``write_interval`` requires.
    Every rank calls these methods with its own predictions.

    Args:
        write_interval: when to write: after each "batch", at the end of the "epoch", or "batch_and_epoch".

    To save memory, pass ``return_predictions=False`` to ``trainer.predict``. Then "batch" keeps no predictions in
    memory, and "epoch" keeps the predictions until the writer has written them.

    Attributes:
        interval: the interval, as a :class:`WriteInterval`.

    Raises:
        ConfigurationError: the interval is unknown. A prediction raises this error if the subclass lacks a method that
            the interval requires.
    """

    needs_batch_indices = True

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        super().__init__()
        check_choice(type(self).__name__, "write_interval", write_interval, [each.value for each in WriteInterval])
        self.interval = WriteInterval(write_interval)
        wanted = {"on_predict_batch_end": self.interval.on_batch, "on_predict_epoch_end": self.interval.on_epoch}
        self._caller_keeps = True
        self.idle_hooks = frozenset(
            hook for hook, needed in wanted.items() if not needed and not overrides(self, hook, BasePredictionWriter)
        )

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: list[int],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the result of ``predict_step`` for one batch.

        Args:
            trainer, pl_module: the Trainer and its module.
            prediction: the output of ``predict_step``, on the device on which ``predict_step`` returned it.
            batch_indices: the indices of the batch's samples in the dataset; empty for an iterable-style dataset.
            batch, batch_idx, dataloader_idx: the batch and its indices.
        """

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: list[Any],
        batch_indices: list[Any],
    ) -> None:
        """Write the predictions of all batches.

        Args:
            trainer, pl_module: the Trainer and its module.
            predictions: the result of ``trainer.predict``, in host memory.
            batch_indices: for each loader, a list with the indices of the samples of each batch.
        """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        for wanted, method, hook in (
            (self.interval.on_batch, "write_on_batch_end", "on_predict_batch_end"),
            (self.interval.on_epoch, "write_on_epoch_end", "on_predict_epoch_end"),
        ):
            if wanted and not any(overrides(self, name, BasePredictionWriter) for name in (method, hook)):
                raise HookError(
                    f"{type(self).__name__}(write_interval={self.interval.value!r}) calls {method}, which it does not "
                    "define. Define it, or choose another interval."
                )
            contract = getattr(BasePredictionWriter, method)
            if wanted and (missing := missing_arguments(getattr(self, method), contract)) is not None:
                raise ConfigurationError(
                    f"{type(self).__name__}.{method}{inspect.signature(getattr(self, method))} cannot be called with "
                    f"the arguments it is given. Write def {method}({missing})."
                )
        if self.interval.on_epoch:
            self._caller_keeps = trainer.predictions.keeps
            trainer.predictions.keeps = True

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if not self.interval.on_batch:
            return
        indices = trainer.predictions.current_batch_indices
        self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.interval.on_epoch:
            return
        found = trainer.predictions
        self.write_on_epoch_end(trainer, pl_module, found.result, found.batch_indices)
        found.keeps = found.keeps and self._caller_keeps
