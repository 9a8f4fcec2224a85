"""LightningModule and Callback of the 1.3 generation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import drivetrain.callback
import drivetrain.module.module
from drivetrain.base.tree import move
from drivetrain.errors import ConfigurationError
from drivetrain.legacy.v1_3 import hooks
from drivetrain.module.hparams import AttributeDict


class LightningModule(drivetrain.module.module.LightningModule):
    """Today's, with the calls of that time.

    Attributes:
        truncated_bptt_steps: train on this many time steps of a batch at once; 0: on all of them.
    """

    truncated_bptt_steps: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, hooks.OF_MODULES)

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters; setting them keeps them for checkpoints and loggers, as ``save_hyperparameters``."""
        found: AttributeDict = self.__dict__.setdefault("_hparams", AttributeDict())
        return found

    @hparams.setter
    def hparams(self, given: Any) -> None:
        self.save_hyperparameters(given)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Step ``optimizer`` with the closure, wherever it is among the arguments."""
        closure: Callable[[], Any] | None = kwargs.get("optimizer_closure", next(filter(callable, args), None))
        optimizer.step(closure=closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int = 0) -> None:
        """Clear the gradients."""
        optimizer.zero_grad()

    def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; the optimizer of that time's second argument is not needed."""
        kwargs.pop("optimizer", None)
        super().manual_backward(loss, *(args[1:] if args and hasattr(args[0], "param_groups") else args), **kwargs)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; ``sync_dist_op`` was the name of ``reduce_fx`` between ranks."""
        for gone in ("tbptt_reduce_fx", "tbptt_pad_token"):
            options.pop(gone, None)
        if (operation := options.pop("sync_dist_op", None)) is not None:
            options.setdefault("reduce_fx", operation)
        super().log(name, value, *args, **options)

    def tbptt_split_batch(self, batch: Any, split_size: int) -> list[Any]:
        """Return the parts of a batch along its time dimension, the second one.

        Raises:
            ConfigurationError: the parts of the batch have different numbers of time steps.
        """
        lengths = {len(each[0]) for each in batch if isinstance(each, (torch.Tensor, list, tuple))}
        if len(lengths) != 1:
            raise ConfigurationError(
                f"truncated_bptt_steps={split_size}: the parts of the batch have {sorted(lengths)} time steps. "
                "Override tbptt_split_batch(batch, split_size)."
            )
        return [
            [_time_steps(each, start, start + split_size) for each in batch]
            for start in range(0, lengths.pop(), split_size)
        ]

    @property
    def use_amp(self) -> bool:
        """Whether automatic mixed precision is used."""
        return self._trainer is not None and "mixed" in self._trainer.strategy.precision_plugin.name

    def get_progress_bar_dict(self) -> dict[str, Any]:
        """Return what the progress bar shows."""
        return {} if self._trainer is None else dict(self._trainer.progress_bar_metrics)


def auto_move_data(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for ``forward``: move its arguments to the module's device."""

    @functools.wraps(method)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = move((args, kwargs), self.device)
        return method(self, *args, **kwargs)

    return moved


def _time_steps(value: Any, start: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:, start:end]
    return [each[start:end] for each in value] if isinstance(value, (list, tuple)) else value


class Callback(drivetrain.callback.Callback):
    """Today's, whose hooks may have the arguments of that time.

    What ``on_save_checkpoint`` returns is kept in the checkpoint, for ``on_load_checkpoint(callback_state)``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, hooks.OF_CALLBACKS)
        hooks.adapt_states(cls)
