"""Lightning's ``fabric.utilities.spike``: detects spikes of the loss in a training loop that uses Fabric."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.callbacks.spike import LossWatch
from drivetrain.engine.engine import Engine

_OPTIONS = ("mode", "warmup", "atol", "rtol")


class FabricSpikeDetection(LossWatch):
    """:class:`drivetrain.callbacks.SpikeDetection` as a callback of Fabric.

    Every rank must call ``fabric.call("on_train_batch_end", fabric=fabric, loss=loss, batch=batch,
    batch_idx=batch_idx)``. If the loss of any rank is a spike, rank 0 writes the batches to leave out to a file. Then
    every rank raises a ``TrainingSpikeException``.

    Args:
        arguments: as for :class:`drivetrain.callbacks.SpikeDetection`. Without ``exclude_batches_path``, rank 0 writes
            the file into the working directory.
    """

    @torch.no_grad()
    def on_train_batch_end(self, fabric: Engine, loss: Tensor, batch: Any, batch_idx: int) -> None:
        """Compare the loss of a batch with earlier losses. This waits for the device.

        Raises:
            TrainingSpikeException: the loss is a spike on at least one rank.
        """
        value = float(loss)
        self.check(fabric, batch_idx >= self.warmup and self.is_spike(value), value, batch_idx, os.getcwd())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the losses, the batches to leave out, and the arguments."""
        path = None if self.exclude_batches_path is None else str(self.exclude_batches_path)
        own = {name: getattr(self, name) for name in _OPTIONS}
        return {**super().state_dict(), **own, "bad_batches_path": path}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""
        super().load_state_dict(state_dict)
        for name in _OPTIONS:
            setattr(self, name, state_dict[name])
        path = state_dict["bad_batches_path"]
        self.exclude_batches_path = None if path is None else Path(path)
