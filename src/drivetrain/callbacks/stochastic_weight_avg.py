"""Stochastic weight averaging: average the weights of the last epochs, in which the learning rates go to constant
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.swa_utils import SWALR

from drivetrain import parity
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import entry
from drivetrain.base.torch_private import BatchNorm
from drivetrain.callback import LightningModule, Trainer
from drivetrain.callbacks.weight_averaging import WeightAveraging
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.kept import objects_kept, workers_kept
from drivetrain.errors import ConfigurationError, check_choice, check_count, is_count, is_number, wrong_value
from drivetrain.loops.pieces import training_step_arguments
from drivetrain.module.export import undisturbed
from drivetrain.module.optimizers import LRSchedulerConfig

_OWNER = "StochasticWeightAveraging"


class StochasticWeightAveraging(WeightAveraging):
    """Averages the weights of the last epochs, in which the learning rates change to constant values.

    From the epoch ``swa_epoch_start`` on, a ``torch.optim.swa_utils.SWALR`` replaces the schedulers. At the end of each
    of these epochs, the callback adds the weights to the average. At the end of training, the module gets the average.
    If the module has batch norm layers, the callback computes their statistics for the averaged weights, in another
    pass over the training data. In this pass, the callback calls ``training_step`` without gradients and discards the
    logged values.

    Validation runs with the trained weights, not with the average. Checkpoints have the entries that
    :class:`WeightAveraging` writes. A resumed run also computes the statistics of batch norm at the end.

    Args:
        swa_lrs: the constant learning rate, or a list with a rate for each parameter group.
        swa_epoch_start: the first epoch, counted from 0, whose weights are averaged; a float is a fraction of
            ``max_epochs``.
        annealing_epochs: the number of epochs in which the learning rates change to ``swa_lrs``.
        annealing_strategy: "cos" (cosine) or "linear".
        avg_fn: ``avg_fn(average, value, n_averaged)`` returns the new average of one tensor; ``None`` computes the
            mean.
        device: the device of the average; ``None`` means the parameters' device.

    Raises:
        ConfigurationError: an argument is invalid. A fit raises this error if the module uses manual optimization, if
            the number of optimizers is not 1, or if ``swa_epoch_start`` is a fraction and ``max_epochs`` is unlimited.
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        device: torch.device | str | None = torch.device("cpu"),  # noqa: B008 (it is never changed)
    ) -> None:
        rates: Any = swa_lrs if isinstance(swa_lrs, (list, tuple)) and swa_lrs else [swa_lrs]
        if not all(is_number(rate) and rate > 0 for rate in rates):
            raise wrong_value(_OWNER, "swa_lrs", swa_lrs, "a positive number or a list of them", "swa_lrs=1e-2")
        start: Any = swa_epoch_start
        if not is_count(start) and not (is_number(start) and 0 <= start <= 1):
            raise wrong_value(_OWNER, "swa_epoch_start", start, "an epoch, or a fraction from 0.0 to 1.0", "0.8")
        check_count(_OWNER, "annealing_epochs", annealing_epochs, otherwise=10)
        check_choice(_OWNER, "annealing_strategy", annealing_strategy, ("cos", "linear"))
        if avg_fn is not None and not callable(avg_fn):
            raise wrong_value(_OWNER, "avg_fn", avg_fn, "a function or None", "None")
        if device is not None and not isinstance(device, (torch.device, str)):
            raise wrong_value(_OWNER, "device", device, 'a device such as "cpu"', "device=None")
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.swa_start = 0
        self._early = False
        super().__init__(device, avg_fn=avg_fn)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= self.swa_start and not self._early

    def _begin(self) -> None:
        super()._begin()
        self.began = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the module and the optimizer. If the fit resumes, continue the checkpoint's schedule."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"{_OWNER} needs one optimizer and automatic optimization, and {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)} with automatic_optimization={pl_module.automatic_optimization}. "
                "Use WeightAveraging, which leaves learning rates alone."
            )
        self.swa_start = self._first_epoch(trainer)
        self._early = parity.current().early_averages
        if self._early:
            self.swa_start, self._use_buffers = max(0, self.swa_start - 1), False
        super().on_fit_start(trainer, pl_module)
        if self.began:
            self._set_scheduler(trainer)

    def _first_epoch(self, trainer: Trainer) -> int:
        if is_count(self.swa_epoch_start):
            return int(self.swa_epoch_start)
        if trainer.max_epochs is None or not 0 <= trainer.max_epochs < math.inf:
            raise ConfigurationError(
                f"{_OWNER}(swa_epoch_start={self.swa_epoch_start}) is a fraction, and max_epochs is unlimited. "
                "Write the number of an epoch, or max_epochs=..."
            )
        return int(self.swa_epoch_start * trainer.max_epochs)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.began and trainer.current_epoch >= self.swa_start:
            self.began = True
            self._set_scheduler(trainer)
        if self._early and trainer.current_epoch >= max(self.swa_start, self.epochs_done):
            self.epochs_done = trainer.current_epoch + 1
            self._update()

    def _set_scheduler(self, trainer: Trainer) -> None:
        optimizer = trainer.optimizers[0]
        rates: Any = self.swa_lrs
        groups = len(optimizer.param_groups)
        if isinstance(rates, Sequence) and len(rates) != groups:
            raise ConfigurationError(
                f"{_OWNER}(swa_lrs={rates}) has {len(rates)} learning rates, and {type(optimizer).__name__} has "
                f"{groups} parameter groups. Write one number for all, or {groups}."
            )
        scheduler = SWALR(optimizer, rates, self.annealing_epochs, self.annealing_strategy)
        gone = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
        trainer.lr_scheduler_configs = [LRSchedulerConfig(scheduler=scheduler)]
        rank_zero_info(
            f"{_OWNER} sets the learning rates from epoch {trainer.current_epoch} on"
            f"{f', in place of {gone[0]}' if gone else ''}."
        )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do nothing: validate with the trained weights."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do nothing: validation ran with the trained weights."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the average into the module, and compute the statistics of batch norm."""
        endless = trainer.max_epochs in (None, -1)
        if self._early and not endless and trainer.current_epoch != trainer.max_epochs:
            return
        super().on_train_end(trainer, pl_module)
        layers = [each for each in pl_module.modules() if isinstance(each, BatchNorm)]
        layers = [each for each in layers if each.running_mean is not None]
        if self.n_averaged and layers and not (self._early and endless):
            _compute_statistics(trainer, pl_module, layers)
            if self._early:
                trainer.optimizers[0].step()  # apply the gradients of the last accumulated batches

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "began": self.began}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.began = entry(state_dict, "began", bool)


# ---- the statistics of batch norm ------------------------------------------------------------------------------------


def _compute_statistics(trainer: Trainer, module: LightningModule, layers: list[Any]) -> None:
    """Compute the running means and variances of batch norm in a pass over the training data, averaged over the ranks.
    All ranks call this function.
    """
    run: Any = trainer.current_run
    loader, strategy = run.loaders.training(), trainer.strategy
    limit = trainer.num_training_batches
    if math.isinf(limit):
        rank_zero_warn(
            f"The training loader has no length, so {_OWNER} cannot compute the statistics of batch norm for the "
            "average. Call torch.optim.swa_utils.update_bn(loader, model)."
        )
        return
    rank_zero_info(f"{_OWNER} computes the statistics of {len(layers)} batch norm layers in a pass over the data.")
    momenta = [layer.momentum for layer in layers]
    modes = {each: each.training for each in module.modules()}
    with undisturbed(module), workers_kept([loader]), objects_kept([loader]):
        for each, training in modes.items():
            # restore the modes, because an override of train() in a submodule may leave the mode as it is
            each.training = training
        module.train()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # with momentum None, batch norm computes the mean over all batches
        try:
            for batch_idx, given in enumerate(loader):
                if batch_idx >= limit:
                    break
                # a combined loader yields a tuple with the indices
                batch = given[0] if isinstance(loader, CombinedLoader) else given
                strategy.training_step(*training_step_arguments(module, strategy.batch_to_device(batch), batch_idx))
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
        for layer in layers if strategy.data.size > 1 else ():
            for statistic in (layer.running_mean, layer.running_var):
                statistic.copy_(strategy.reduce(statistic.clone(), reduce_op="mean"))
