"""Stop when the loss leaps, and write down which batches to leave out."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from drivetrain.base.files import is_remote, spelled, write
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import entry
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, DrivetrainError, is_count, is_number, wrong_value

if TYPE_CHECKING:
    from drivetrain.module.module import LightningModule
    from drivetrain.trainer.trainer import Trainer


class TrainingSpikeException(DrivetrainError, RuntimeError):
    """The loss of a batch was a spike.

    Attributes:
        batch_idx: the batch, counted in its epoch.
    """

    def __init__(self, batch_idx: int, *args: Any) -> None:
        super().__init__(*(args or (f"The loss of batch {batch_idx} was a spike.",)))
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """Stops training when the loss of a batch leaps, on any rank, and writes down which batches to leave out.

    A loss is a spike if it is worse than the one before, and differs from the mean of the last ``window`` losses by at
    least ``atol`` and by at least ``rtol`` times that mean. The indices of the batch and of the one before it are added
    to a JSON list, because either may have caused it, and the run ends with a :class:`TrainingSpikeException`. The
    optimizer has made its step by then: resume from an earlier checkpoint. Each batch waits for the device.

    Args:
        mode: "min": larger is worse; "max": smaller is worse.
        window: over how many losses the mean is taken.
        warmup: how many batches are never a spike.
        atol, rtol: the smallest differences of a spike; ``None``: none is too small.
        exclude_batches_path: the file, or the folder for ``skip_batches.json``; ``None``: the Trainer's
            ``default_root_dir``.
        finite_only: a loss that is not finite is a spike, too; otherwise it is passed over.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    needs_every_rank = True

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | Path | None = None,
        finite_only: bool = True,
    ) -> None:
        super().__init__()
        if mode not in ("min", "max"):
            raise wrong_value("SpikeDetection", "mode", mode, '"min" or "max"', 'mode="min"')
        if not is_count(window, 1) or not is_count(warmup):
            raise ConfigurationError(
                f"SpikeDetection(window={window!r}, warmup={warmup!r}): both are numbers of batches. Write window=10, "
                "warmup=1."
            )
        for name, value in (("atol", atol), ("rtol", rtol)):
            if value is not None and not is_number(value):
                raise wrong_value("SpikeDetection", name, value, "a number or None", f"{name}=2.0")
        self.mode, self.window, self.warmup, self.atol, self.rtol = mode, window, warmup, atol, rtol
        self.exclude_batches_path, self.finite_only = exclude_batches_path, finite_only
        self.last_val = 0.0 if mode == "max" else math.inf
        self.bad_batches: list[int] = []
        self._losses: deque[float] = deque(maxlen=window)
        self._batches = 0
        self._said = False  # that there is no loss to look at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is None and not pl_module.automatic_optimization and not self._said:
            self._said = True
            rank_zero_warn(
                f"SpikeDetection sees no loss: {type(pl_module).__name__} optimizes manually, and its training_step "
                "has returned none. Return the loss from training_step."
            )
        value = math.nan if loss is None else float(loss)
        is_spike = loss is not None and self._batches >= self.warmup and self._is_spike(value)
        if trainer.strategy.reduce_boolean_decision(is_spike, all=False):
            self._stop(trainer, batch_idx, value)
        self._batches += 1
        if math.isfinite(value):
            self._losses.append(value)
            self.last_val = value

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return self.finite_only
        if not self._losses or (value <= self.last_val if self.mode == "min" else value >= self.last_val):
            return False
        mean = sum(self._losses) / len(self._losses)
        difference = abs(value - mean)
        far = self.atol is None or difference >= abs(self.atol)
        return far and (self.rtol is None or difference >= abs(self.rtol * mean))

    def _stop(self, trainer: Trainer, batch_idx: int, value: float) -> None:
        self.bad_batches += [batch_idx] if batch_idx == 0 else [batch_idx - 1, batch_idx]
        path = spelled(self.exclude_batches_path or trainer.default_root_dir)
        path = path if path.endswith(".json") else os.path.join(path, "skip_batches.json")
        if trainer.is_global_zero:
            if not is_remote(path):
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            write(path, json.dumps(self.bad_batches, indent=4).encode())
        mean = sum(self._losses) / max(1, len(self._losses))
        raise TrainingSpikeException(
            batch_idx,
            f"Training spike: the loss of batch {batch_idx} in epoch {trainer.current_epoch} leapt on at least one "
            f"rank. On rank {trainer.global_rank} it is {value:.6g}, after a mean of {mean:.6g}. The batches to leave "
            f"out are in {path}. Resume from an earlier checkpoint with a sampler that leaves them out.",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_val": self.last_val, "bad_batches": list(self.bad_batches), "losses": list(self._losses),
            "batches": self._batches,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_val = float(entry(state_dict, "last_val", (int, float, Tensor)))
        self.bad_batches = list(entry(state_dict, "bad_batches", list))
        self._losses = deque(state_dict.get("losses", ()), maxlen=self.window)
        self._batches = int(state_dict.get("batches", self.warmup))
