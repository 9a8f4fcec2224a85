"""Gradient accumulation over a number of batches that depends on the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, RunError, is_count, wrong_value


class GradientAccumulationScheduler(Callback):
    """Sets the Trainer's ``accumulate_grad_batches`` at the start of each epoch.

    Args:
        scheduling: the number of batches per optimizer step, by the epoch (counted from 0) from which it applies. For
            example, with ``{4: 2}``, a step takes 1 batch in epochs 0 to 3, and 2 batches from epoch 4 on.

    When the fit ends or fails, the callback sets the Trainer's value back to 1.

    Raises:
        ConfigurationError: an epoch or a number of batches is invalid. A fit raises this error if
            ``accumulate_grad_batches`` of the Trainer is not 1, or if the module uses manual optimization.
    """

    needs_every_rank = True

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        super().__init__()
        is_schedule = isinstance(scheduling, Mapping) and bool(scheduling)
        if not is_schedule or not all(is_count(key) and is_count(value, 1) for key, value in scheduling.items()):
            expected = "a dictionary of epochs from 0 and numbers of batches from 1"
            cure = "for example scheduling={0: 4, 5: 1}"
            kinds = (Mapping,) if scheduling else ()  # an empty schedule is a TypeError, as in Lightning
            raise wrong_value("GradientAccumulationScheduler", "scheduling", scheduling, expected, cure, kinds)
        self.scheduling = {0: 1, **dict(sorted(scheduling.items()))}
        self.epochs = sorted(self.scheduling)
        self._in_charge = False

    @property
    def state_key(self) -> str:
        return self._generate_state_key(scheduling=self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether gradients are accumulated in any epoch."""
        return any(batches > 1 for batches in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches per optimizer step in ``epoch``."""
        return self.scheduling[max(start for start in self.scheduling if start <= epoch)]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and a "
                "GradientAccumulationScheduler both say how many batches to accumulate. Leave one out."
            )
        if not pl_module.automatic_optimization:
            raise RunError(
                f"{type(pl_module).__name__}.automatic_optimization is False, so a GradientAccumulationScheduler would "
                "do nothing. Leave it out and call optimizer.step() in every n-th training_step only."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # if a fit resumes in the middle of an epoch, on_train_epoch_start is not called
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._in_charge = True
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def teardown(self, trainer: Trainer, *_: Any, **more: Any) -> None:
        if self._in_charge:  # only reset a value that this callback has set
            self._in_charge = False
            trainer.accumulate_grad_batches = 1

    on_exception = teardown
