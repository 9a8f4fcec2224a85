"""What a name that is logged per step and per epoch means in generations 1.x: the value of the last step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.logbook.logbook import Logbook


class LastSteps(Logbook):
    """Today's, in which ``loss`` is the last step's value, as of the epoch's end; ``loss_epoch`` is the mean.

    A metric object is what it has computed, as today.
    """

    def refresh(self) -> dict[str, Any]:
        both = [each for each in self._entries(self.group) if each.on_step and each.on_epoch and each.metric is None]
        before = {entry.name: self.callback_metrics.get(entry.name) for entry in both}
        metrics = super().refresh()
        for entry in both:
            newest = self._newest(entry)
            if not self.epoch_done and before[entry.name] is None:
                metrics.pop(entry.name, None)  # there is no such value before the first epoch has ended
            elif not self.epoch_done:
                metrics[entry.name] = before[entry.name]
            elif newest is not None:
                metrics[entry.name] = torch.as_tensor(newest, dtype=metrics[entry.epoch_name].dtype)
        return metrics


def with_last_steps(results: Sequence[Any], metrics: dict[str, Any]) -> list[Any]:
    """Return an evaluation's results, each with the last step's value beside that of the epoch, as they were."""
    found = []
    for result in results:
        names = [(name, name.replace("_epoch/dataloader_idx_", "/dataloader_idx_", 1)) for name in result]
        names = [(name, base if base != name else name.removesuffix("_epoch")) for name, base in names]
        more = {base: float(metrics[base]) for name, base in names if base not in result and base in metrics}
        found.append({**result, **more})
    return found
