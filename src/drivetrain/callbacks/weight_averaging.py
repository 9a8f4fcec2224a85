"""Callbacks that average a module's weights. Validation uses the average, and the module gets the average after
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from drivetrain.base import torch_private
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.restoring import COUNT, entry
from drivetrain.base.torch_private import own_buffers, own_parameters
from drivetrain.callback import KeepsWeights, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, NotSupportedError, check_count, is_number, wrong_value
from drivetrain.module.trainable import is_strict
from drivetrain.strategies.sharded_state import local_shard
from drivetrain.trainer.weights import AVERAGED

_COUNTS = ("n_averaged", "steps_done", "epochs_done")


class WeightAveraging(KeepsWeights):
    """Keeps an average of the module's weights, updated after optimizer steps or epochs.

    Validation inside a fit uses the average, and the module gets the average at the end of training. Before the first
    update, validation uses the trained weights. By default, the average is the mean over all updates.

    A checkpoint contains the trained weights in "state_dict" and the average in "averaged_state_dict", with the same
    keys. A resumed fit restores both; ``trainer.validate``, ``test`` and ``predict`` with a ``ckpt_path`` use the
    average. To load the average yourself::

        model.load_state_dict(torch.load(path, weights_only=True)["averaged_state_dict"])

    If parameters are sharded, each rank averages its own shards, and the ranks do not communicate.

    Args:
        device: the device of the average; ``None`` means the parameters' device.
        use_buffers: average floating-point buffers too, such as the statistics of batch norm. Other buffers are never
            averaged.
        avg_fn: ``avg_fn(average, value, n_averaged)`` returns the new average of one tensor.
        multi_avg_fn: ``multi_avg_fn(averages, values, n_averaged)`` changes a list of averages in place; all tensors of
            a list have the same device and dtype. ``torch.optim.swa_utils`` has functions of both kinds.

    Raises:
        ConfigurationError: both ``avg_fn`` and ``multi_avg_fn`` were passed.
    """

    needs_every_rank = True

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], Any], None] | None = None,
    ) -> None:
        super().__init__()
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(
                f"{type(self).__name__} got both avg_fn and multi_avg_fn. Pass one of them, or none for an average in "
                "which all updates have equal weight."
            )
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise wrong_value(type(self).__name__, "device", device, 'a device such as "cpu"', "device=None") from error
        self._use_buffers = use_buffers
        self._avg_fn = avg_fn
        self._multi_avg_fn = _equal_weights if multi_avg_fn is None else multi_avg_fn
        self._begin()

    def _begin(self) -> None:
        self.n_averaged = 0
        self.steps_done = 0  # the number of optimizer steps at the last update
        self.epochs_done = 0
        # each pair has the average of a tensor and the module's tensor, or this rank's shards of both
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self._in_module = False  # whether the module has the average, and _pairs the trained weights
        self._sharded = False
        self._loaded: Mapping[str, Any] | None = None

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now. Override this method to choose other times.

        Args:
            step_idx: the last optimizer step, counted from 0; ``None`` at the end of an epoch.
            epoch_idx: the epoch that has just ended; ``None`` after a step.
        """
        return step_idx is not None

    # ---- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._begin()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a new average. If the fit resumes, continue the checkpoint's average."""
        averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, WeightAveraging)]
        if len(averaging) > 1:
            raise ConfigurationError(
                f"The Trainer has {len(averaging)} callbacks that average weights: {', '.join(averaging)}. Validation, "
                "checkpoints and the module at the end can have one average. Pass one of them."
            )
        if any(hasattr(parameter, "ds_id") for parameter in pl_module.parameters()):
            raise NotSupportedError(
                f"{type(self).__name__} cannot average parameters that DeepSpeed's stage 3 has split up. Use a lower "
                'stage, or strategy="fsdp".'
            )
        self._pair([
            (tensor.detach().to(self._device or tensor.device, copy=True), tensor)
            for tensor in _local_tensors(pl_module, self._use_buffers)
        ])  # fmt: skip
        self._sharded = any(local_shard(each) is not each for each in pl_module.parameters())
        if self._loaded is not None:
            # Loading the average also changes buffers that are not averaged, so the trained values of these buffers are
            # set again.
            averaged = {id(each) for each in _averaged_buffers(pl_module)} if self._use_buffers else set()
            others = [each for each in pl_module.buffers() if id(each) not in averaged]
            trained = [buffer.clone() for buffer in others]
            trainer.strategy.load_model_state_dict({"state_dict": self._loaded}, strict=is_strict(pl_module))
            self._exchange()
            self._in_module = False  # after the swap, the module has the trained weights
            for buffer, value in zip(others, trained, strict=True):
                buffer.data.copy_(value)
            self._loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.progress.global_step
        if step > self.steps_done and self.should_update(step_idx=step - 1):
            self.steps_done = step
            self._update()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if epoch >= self.epochs_done and self.should_update(epoch_idx=epoch):
            self.epochs_done = epoch + 1
            self._update()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pairs and self.n_averaged and trainer.progress.fn == "fit" and not self._in_module:
            self._exchange()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._in_module and trainer.progress.fn == "fit":
            self._exchange()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the average into the module."""
        if self.n_averaged and not self._in_module:
            self._exchange()
            rank_zero_info(
                f"{type(self).__name__}: the module now has the average of its weights over {self.n_averaged} updates."
            )
        elif not self.n_averaged and not trainer.fast_dev_run:
            rank_zero_warn(
                f"{type(self).__name__} has made no update in {trainer.global_step} steps and {trainer.current_epoch} "
                "epochs, so there is no average, and the module has the trained weights. Let it begin earlier."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_validation_epoch_end(trainer, pl_module)

    # ---- the average ---------------------------------------------------------------------------------------------

    def _pair(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for average, own in pairs:
            averages, values = groups.setdefault((average.device, own.device, own.dtype), ([], []))
            averages.append(average)
            values.append(own)
        self._pairs, self._groups = pairs, list(groups.values())

    def _find_shards(self) -> None:
        """Find the module's shards again, because in torch 2.9 the first forward pass of FSDP moves padded shards to
        other memory.
        """
        if self._sharded:
            own = _local_tensors(self.pl_module, self._use_buffers)
            self._pair([(average, tensor) for (average, _), tensor in zip(self._pairs, own, strict=True)])

    @torch.no_grad()
    def _update(self) -> None:
        self._find_shards()
        for averages, values in self._groups:
            if averages[0].device != values[0].device:
                values = [value.to(averages[0].device, non_blocking=False) for value in values]
            if self.n_averaged == 0:
                torch_private.foreach_copy_(averages, values)
            elif self._avg_fn is not None:
                number = torch.tensor(self.n_averaged)
                for average, value in zip(averages, values, strict=True):
                    average.copy_(self._avg_fn(average, value, number))
            else:
                self._multi_avg_fn(averages, values, torch.tensor(self.n_averaged))
        self.n_averaged += 1

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the values of the module with the values in ``_pairs``.

        The swap writes through ``.data``, so the parameters' version counters do not change. Autograd and the
        checkpoint after an exception read these counters.
        """
        self._find_shards()
        for kept, own in self._pairs:
            values = own.data.clone()
            own.data.copy_(kept)
            kept.copy_(values)
        self._in_module = not self._in_module

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "latest_update_step" in state_dict:  # a state of Lightning, which keeps further entries in "averaging_state"
            self.steps_done = entry(state_dict, "latest_update_step", COUNT)
            return
        for name in _COUNTS:
            setattr(self, name, entry(state_dict, name, COUNT))

    def save_weights(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the trained weights into "state_dict" and the average into "averaged_state_dict"."""
        if not self._pairs or not self.n_averaged:
            return
        mine = {_storage(tensor) for tensor in _local_tensors(pl_module, True)}

        def copied(state: Mapping[str, Any]) -> dict[str, Any]:
            return {name: _copied(value, mine) for name, value in state.items()}

        found = copied(checkpoint["state_dict"])
        self._exchange()
        try:
            other = copied(trainer.strategy.lightning_module_state_dict())
        finally:
            self._exchange()
        checkpoint["state_dict"], checkpoint[AVERAGED] = (other, found) if self._in_module else (found, other)

    def load_weights(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any], fitting: bool
    ) -> None:
        """In a fit, keep the checkpoint's average for :meth:`on_fit_start`. In an evaluation, load the average into the
        module.
        """
        if "current_model_state" in checkpoint:  # Lightning's layout: "state_dict" contains the average
            checkpoint[AVERAGED] = checkpoint["state_dict"]
            checkpoint["state_dict"] = checkpoint.pop("current_model_state")
        if AVERAGED not in checkpoint:
            return
        averaged = entry(checkpoint, AVERAGED, Mapping)
        if fitting:
            self._loaded = averaged
        else:
            checkpoint["state_dict"] = averaged
            rank_zero_info(f"Using the averaged weights of the checkpoint ({AVERAGED!r}).")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read the number of updates. Lightning's checkpoints store the number outside of the callback's state."""
        if "averaging_state" in checkpoint:
            self.n_averaged = int(entry(checkpoint["averaging_state"], "n_averaged", (Tensor, int)))


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``.

    Args:
        device: as in :class:`WeightAveraging`.
        use_buffers: as in :class:`WeightAveraging`.
        decay: the weight of the old average in an update, from 0 to 1.
        update_every_n_steps: update after every n-th optimizer step; 0 turns these updates off.
        update_starting_at_step: the first optimizer step, counted from 0, after which the average can be updated;
            ``None`` means 0.
        update_starting_at_epoch: from this epoch on, also update at the end of each epoch. With ``None``, there are no
            such updates.

    Raises:
        ConfigurationError: a value is out of range.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not is_number(decay) or not 0 <= decay <= 1:
            raise wrong_value("EMAWeightAveraging", "decay", decay, "a number from 0 to 1", "decay=0.999")
        check_count("EMAWeightAveraging", "update_every_n_steps", update_every_n_steps)
        check_count("EMAWeightAveraging", "update_starting_at_step", update_starting_at_step, optional=True)
        check_count("EMAWeightAveraging", "update_starting_at_epoch", update_starting_at_epoch, optional=True)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        super().__init__(device, use_buffers, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            every, start = self.update_every_n_steps, self.update_starting_at_step
            return every > 0 and step_idx % every == 0 and step_idx >= (start or 0)
        start = self.update_starting_at_epoch
        return epoch_idx is not None and start is not None and epoch_idx >= start


def _equal_weights(averages: list[Tensor], values: list[Tensor], n_averaged: Tensor) -> None:
    """Update ``averages`` to the mean over all updates. torch's own function is not used, because it divides in
    float32.
    """
    differences = torch_private.foreach_sub(values, averages)
    torch_private.foreach_div_(differences, int(n_averaged) + 1)
    torch_private.foreach_add_(averages, differences)


def _local_tensors(module: torch.nn.Module, buffers: bool) -> Iterator[Tensor]:
    """Yield this rank's shard of each parameter. With ``buffers``, also yield this rank's shard of each averaged
    buffer. A tensor with two names is yielded once.
    """
    for parameter in module.parameters():
        yield local_shard(parameter.data)
    for buffer in _averaged_buffers(module) if buffers else ():
        yield local_shard(buffer.data)


def _averaged_buffers(module: torch.nn.Module) -> list[Tensor]:
    """Return the floating-point and complex buffers, except the masks of torch's pruning."""
    masks = {
        id(buffer)
        for each in module.modules()
        for name, buffer in own_buffers(each).items()
        if name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in own_parameters(each)
    }
    return [
        each for each in module.buffers() if (each.is_floating_point() or each.is_complex()) and id(each) not in masks
    ]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copied(value: Any, of_module: set[int]) -> Any:
    """Copy ``value`` if it is a tensor in the module's memory. Return any other value unchanged."""
    if isinstance(value, Tensor) and _storage(local_shard(value)) in of_module:
        return value.detach().clone()
    return value
