"""LightningModule and Callback of Lightning 1.3."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

import drivetrain.callback
import drivetrain.module.module
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.tree import move
from drivetrain.errors import ConfigurationError
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.defaults import set_defaults
from drivetrain.legacy.v1_3.helpers import ModelSummary, grad_norm
from drivetrain.legacy.v1_3.loggers import as_one


class LightningModule(drivetrain.module.module.LightningModule):
    """drivetrain's LightningModule, with the methods of Lightning 1.3.

    Attributes:
        truncated_bptt_steps: the number of time steps per part, if a batch is trained in parts; 0: train on the
            complete batch.
    """

    _datamodule: Any = None

    @property
    def logger(self) -> Any:
        """The logger; for several loggers, a :class:`~drivetrain.legacy.v1_3.loggers.LoggerCollection`."""
        return as_one(self.loggers)

    @property
    def datamodule(self) -> Any:
        """The data module that was assigned to this property; by default, the data module of the run."""
        return self._datamodule or (None if self._trainer is None else self._trainer.datamodule)

    @datamodule.setter
    def datamodule(self, datamodule: Any) -> None:
        self._datamodule = datamodule

    def grad_norm(self, norm_type: float | int | str) -> dict[str, float]:
        """Return the norm of each parameter's gradient and the total norm."""
        return grad_norm(self, norm_type)

    def summarize(self, mode: str | None = ModelSummary.MODE_DEFAULT) -> ModelSummary | None:
        """Return a summary of the module, and log the summary; ``None`` for ``mode=None``."""
        summary = None if mode is None else ModelSummary(self, mode)
        if summary is not None:
            rank_zero_info(f"\n{summary}")
        return summary

    def write_prediction(self, name: str, value: Any, filename: str = "predictions.pt") -> None:
        """Add the items of ``value``, a tensor or a list, to a column of a file. The file is written after the
        evaluation.
        """
        items = value.tolist() if isinstance(value, torch.Tensor) else value
        vars(self).setdefault("_predictions", {}).setdefault(filename, {}).setdefault(name, []).extend(items)

    def write_prediction_dict(self, predictions_dict: Mapping[str, Any], filename: str = "predictions.pt") -> None:
        """Store several columns."""
        for name, value in predictions_dict.items():
            self.write_prediction(name, value, filename)

    def save_predictions(self) -> None:
        """Write the files of :meth:`write_prediction`; each row is stored as a dictionary. Called at the end of an
        evaluation.

        Raises:
            ConfigurationError: the columns of a file have different lengths.
        """
        for filename, columns in vars(self).pop("_predictions", {}).items():
            lengths = {name: len(items) for name, items in columns.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigurationError(
                    f"The columns that write_prediction got for {filename!r} have different lengths: {lengths}. Pass "
                    "one value per sample for each name, or another filename."
                )
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)
            root, ending = os.path.splitext(filename)
            several = self.trainer.world_size > 1
            torch.save(rows, f"{root}_rank_{self.global_rank}{ending}" if several else filename)

    # ---- methods for steps, with earlier arguments -------------------------------------------------------------------

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Step ``optimizer`` with the closure: ``optimizer_closure`` or the first callable in ``args``."""
        closure: Callable[[], Any] | None = kwargs.get("optimizer_closure", next(filter(callable, args), None))
        optimizer.step(closure=closure)

    def transfer_batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move the batch to ``device``; ``None``: to the module's device."""
        return super().transfer_batch_to_device(batch, self.device if device is None else device, dataloader_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int = 0) -> None:
        """Clear the gradients."""
        optimizer.zero_grad()

    def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Compute gradients. The second argument in Lightning 1.x, an optimizer, is ignored."""
        kwargs.pop("optimizer", None)
        super().manual_backward(loss, *(args[1:] if args and hasattr(args[0], "param_groups") else args), **kwargs)

    def toggle_optimizer(self, optimizer: Any, optimizer_idx: int | None = None) -> None:
        """Set ``requires_grad`` so that only the parameters of ``optimizer`` get gradients."""
        super().toggle_optimizer(optimizer)

    def untoggle_optimizer(self, optimizer_idx: Any) -> None:
        """Undo :meth:`toggle_optimizer` for an optimizer or the index of an optimizer."""
        is_index = isinstance(optimizer_idx, int)
        super().untoggle_optimizer(self.trainer.optimizers[optimizer_idx] if is_index else optimizer_idx)

    truncated_bptt_steps: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, hooks.OF_MODULES)

    @drivetrain.module.module.LightningModule.hparams.setter  # type: ignore[attr-defined,untyped-decorator]  # a property
    def hparams(self, given: Any) -> None:
        """Call ``save_hyperparameters(given)``."""
        self.save_hyperparameters(given)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value. The former argument ``sync_dist_op`` is passed on as ``reduce_fx``."""
        for gone in ("tbptt_reduce_fx", "tbptt_pad_token"):
            options.pop(gone, None)
        if (operation := options.pop("sync_dist_op", None)) is not None:
            options.setdefault("reduce_fx", operation)
        super().log(name, value, *args, **options)

    def tbptt_split_batch(self, batch: Any, split_size: int) -> list[Any]:
        """Split a batch into parts along the time dimension, which is the second dimension.

        Raises:
            ConfigurationError: the items of the batch have different numbers of time steps.
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
        """Return the values for the progress bar."""
        return {} if self._trainer is None else dict(self._trainer.progress_bar_metrics)


def auto_move_data(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for ``forward``: move the arguments of ``forward`` to the module's device."""

    @functools.wraps(method)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = move((args, kwargs), self.device)
        return method(self, *args, **kwargs)

    return moved


def _time_steps(value: Any, start: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:, start:end]
    return [each[start:end] for each in value] if isinstance(value, (list, tuple)) else value


set_defaults(
    LightningModule,
    drivetrain.module.module.LightningModule,
    (*hooks.GONE_FROM_MODULES, *(name for name in hooks.OF_MODULES if name.startswith("on_"))),
)


class Callback(drivetrain.callback.Callback):
    """drivetrain's Callback; hooks can have the parameters of Lightning 1.3.

    The result of ``on_save_checkpoint`` is saved in the checkpoint, and passed to
    ``on_load_checkpoint(callback_state)``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks.adapt(cls, hooks.OF_CALLBACKS)
        hooks.adapt_states(cls)


set_defaults(
    Callback, drivetrain.callback.Callback, (*hooks.GONE_FROM_CALLBACKS, *hooks.OF_CALLBACKS, "on_load_checkpoint")
)
