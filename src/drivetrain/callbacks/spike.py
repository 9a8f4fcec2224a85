"""Stop training at a spike of the loss, and record the batches that may have caused it."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from drivetrain.base.files import is_remote, spelled, write
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.restoring import entry
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import DrivetrainError, check_choice, check_count, is_number, wrong_value


class TrainingSpikeException(DrivetrainError, RuntimeError):
    """The loss of a batch has a spike.

    Attributes:
        batch_idx: the index of the batch in its epoch.
    """

    def __init__(self, batch_idx: int, *args: Any) -> None:
        super().__init__(*(args or (f"The loss of batch {batch_idx} was a spike.",)))
        self.batch_idx = batch_idx


class LossWatch:
    """Compares each loss with the previous losses. After a spike, records the batches that may have caused it.

    Args:
        arguments: the arguments of :class:`SpikeDetection`.
    """

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
        check_choice("SpikeDetection", "mode", mode, ("min", "max"))
        check_count("SpikeDetection", "window", window, lowest=1, otherwise=10)
        check_count("SpikeDetection", "warmup", warmup)
        for name, value in (("atol", atol), ("rtol", rtol)):
            if value is not None and not is_number(value):
                raise wrong_value("SpikeDetection", name, value, "a number or None", f"{name}=2.0")
        self.mode, self.window, self.warmup, self.atol, self.rtol = mode, window, warmup, atol, rtol
        self.exclude_batches_path, self.finite_only = exclude_batches_path, finite_only
        self.last_val = 0.0 if mode == "max" else math.inf
        self.bad_batches: list[int] = []
        self._losses: deque[float] = deque(maxlen=window)

    def is_spike(self, value: float) -> bool:
        """Return whether a loss is a spike, compared with the losses so far."""
        if not math.isfinite(value):
            return self.finite_only
        if not self._losses or (value <= self.last_val if self.mode == "min" else value >= self.last_val):
            return False
        difference = abs(value - self._mean())
        far = self.atol is None or difference >= abs(self.atol)
        return far and (self.rtol is None or difference >= abs(self.rtol * self._mean()))

    def add(self, value: float) -> None:
        """Add a finite loss to the mean. Ignore a non-finite loss."""
        if math.isfinite(value):
            self._losses.append(value)
            self.last_val = value

    def exclude(self, batch_idx: int, place: str | Path, writes: bool) -> str:
        """Record this batch and the previous batch as batches to leave out.

        Args:
            batch_idx: the index of the batch with the spike.
            place: the file for the batches to leave out, or its folder.
            writes: whether this rank writes the file.

        Returns:
            The file.
        """
        self.bad_batches += [batch_idx] if batch_idx == 0 else [batch_idx - 1, batch_idx]
        path = spelled(place)
        path = path if path.endswith(".json") else os.path.join(path, "skip_batches.json")
        if writes:
            if not is_remote(path):
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            write(path, json.dumps(self.bad_batches, indent=4).encode())
        return path

    def check(self, run: Any, is_spike: bool, value: float, batch_idx: int, place: str | Path, epoch: str = "") -> None:
        """If no rank has a spike, add the loss. Otherwise, record the batches and raise an error.

        Args:
            run: the Trainer or the Engine.
            is_spike: whether this rank's loss is a spike.
            value: the loss.
            batch_idx: the index of the batch.
            place: the file or folder for the batches to leave out, if ``exclude_batches_path`` was not given.
            epoch: a text about the epoch, for the message.

        Raises:
            TrainingSpikeException: the loss is a spike on at least one rank.
        """
        if not run.strategy.reduce_boolean_decision(is_spike, all=False):
            self.add(value)
            return
        path = self.exclude(batch_idx, self.exclude_batches_path or place, run.is_global_zero)
        raise TrainingSpikeException(
            batch_idx,
            f"Training spike: the loss of batch {batch_idx}{epoch} jumped on at least one rank. On rank "
            f"{run.global_rank} it is {value:.6g}, after a mean of {self._mean():.6g}. The batches to leave out are in "
            f"{path}. Resume from an earlier checkpoint with a sampler that leaves them out.",
        )

    def _mean(self) -> float:
        return sum(self._losses) / max(1, len(self._losses))

    def state_dict(self) -> dict[str, Any]:
        return {"last_val": self.last_val, "bad_batches": list(self.bad_batches), "losses": list(self._losses)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.last_val = float(entry(state_dict, "last_val", (int, float, Tensor)))
        self.bad_batches = list(entry(state_dict, "bad_batches", list))
        self._losses = deque(state_dict.get("losses", ()), maxlen=self.window)


class SpikeDetection(LossWatch, Callback):
    """Stops training when the loss of any rank has a spike, and records the batches that a later run should leave out.

    A loss is a spike if two conditions hold. It is worse than the previous loss. It differs from the mean of the last
    ``window`` losses by at least ``atol``, and by at least ``rtol`` times the mean. This batch or the previous batch
    may have caused the spike. The callback therefore writes the indices of both batches to a JSON file, as a list. The
    run ends with a :class:`TrainingSpikeException`. The optimizer has stepped before the error, so resume from an
    earlier checkpoint. Checking a batch waits for the device.

    Args:
        mode: "min" if a larger loss is worse, "max" if a smaller loss is worse.
        window: the number of losses in the mean.
        warmup: the number of batches at the start that are not checked.
        atol, rtol: the smallest absolute and the smallest relative difference of a spike; ``None`` allows any
            difference.
        exclude_batches_path: the file, or the folder for ``skip_batches.json``; ``None`` means the Trainer's
            ``default_root_dir``.
        finite_only: treat a non-finite loss as a spike; otherwise, ignore a non-finite loss.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    needs_every_rank = True

    _batches = 0
    _said = False  # whether the warning about a missing loss was logged

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None and not pl_module.automatic_optimization and not self._said:
            self._said = True
            rank_zero_warn(
                f"SpikeDetection sees no loss: {type(pl_module).__name__} optimizes manually, and its training_step "
                "has returned none. Return the loss from training_step."
            )
        value = math.nan if loss is None else float(loss)
        is_spike = loss is not None and self._batches >= self.warmup and self.is_spike(value)
        folder = trainer.default_root_dir
        self.check(trainer, is_spike, value, batch_idx, folder, f" in epoch {trainer.current_epoch}")
        self._batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "batches": self._batches}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._batches = int(state_dict.get("batches", self.warmup))
