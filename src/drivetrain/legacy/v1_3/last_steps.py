"""The logbook of Lightning 1.x. If ``loss`` is logged per step and per epoch, ``loss`` is the last step's value at the
end of the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drivetrain.logbook.entry import LogRule
from drivetrain.logbook.logbook import Logbook

_RETURNED = "a returned dictionary"
_NO_NUMBERS = ("log", "progress_bar", "hiddens")


class LastSteps(Logbook):
    """drivetrain's Logbook with one change: after an epoch, ``loss`` is the last step's value instead of the mean.

    The mean has the name ``loss_epoch``. For a metric object, ``loss`` is the metric's value for the epoch, as in
    drivetrain's Logbook.

    Args:
        sum_dtype: as for Logbook.
        takes_dictionaries: whether steps and ``*_epoch_end`` hooks can return dictionaries with numbers for callbacks,
            as in Lightning 1.1.
    """

    def __init__(self, sum_dtype: torch.dtype, takes_dictionaries: bool = False) -> None:
        super().__init__(sum_dtype)
        self.takes_dictionaries = takes_dictionaries

    def keep_returned(self, module: Any, returned: Mapping[str, Any]) -> None:
        """Log the numbers in a returned dictionary for callbacks only. Leave out names that the module logs with
        ``self.log``.
        """
        scopes = self._groups.get(self.group, {}).values()
        logged = {entry.name for scope in scopes if scope.hook != _RETURNED for entry in scope.entries.values()}
        trains = self.scope is not None and self.scope.hook == "training_step"
        outer = self.enter(self.scope_for(self.group, _RETURNED, LogRule(on_step=trains, on_epoch=not trains)))
        for name, value in returned.items():
            if name not in logged and name not in _NO_NUMBERS and _is_number(value):
                module.log(name, value, logger=False)
        self.enter(outer)

    def state_dict(self, group: str) -> list[dict[str, Any]]:
        return [state for state in super().state_dict(group) if state["hook"] != _RETURNED]

    def refresh(self) -> dict[str, Any]:
        both = [each for each in self._entries(self.group) if each.on_step and each.on_epoch and each.metric is None]
        before = {entry.name: self.callback_metrics.get(entry.name) for entry in both}
        metrics = super().refresh()
        for entry in both:
            newest = self._newest(entry)
            if not self.epoch_done and before[entry.name] is None:
                metrics.pop(entry.name, None)  # the last step's value exists only after an epoch
            elif not self.epoch_done:
                metrics[entry.name] = before[entry.name]
            elif newest is not None:
                metrics[entry.name] = torch.as_tensor(newest, dtype=metrics[entry.epoch_name].dtype)
        return metrics


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else type(value) in (int, float)


def with_last_steps(results: Sequence[Any], metrics: dict[str, Any]) -> list[Any]:
    """Add the last step's values to an evaluation's results, as in Lightning 1.x."""
    found = []
    for result in results:
        names = [(name, name.replace("_epoch/dataloader_idx_", "/dataloader_idx_", 1)) for name in result]
        names = [(name, base if base != name else name.removesuffix("_epoch")) for name, base in names]
        more = {base: float(metrics[base]) for name, base in names if base not in result and base in metrics}
        found.append({**result, **more})
    return found
