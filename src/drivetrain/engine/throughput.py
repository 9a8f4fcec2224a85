"""Compute the throughput of a loop: samples, batches and operations per second, and the fraction of the device's
peak.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.accelerators.peak_flops import get_available_flops
from drivetrain.errors import ConfigurationError, check_count, is_number, wrong_value

if TYPE_CHECKING:
    from drivetrain.engine.engine import Engine


class Throughput:
    """Computes rates, such as samples per second, over the last updates.

    ``compute`` returns ``device/batches_per_sec`` and ``device/samples_per_sec``. If ``update`` gets lengths, the
    result also contains ``device/items_per_sec``. If ``update`` gets operations (``flops``), the result also contains
    ``device/flops_per_sec`` and ``device/mfu``, the fraction of ``available_flops``. With several devices, the result
    also contains ``batches_per_sec`` and so on: the rates of all devices together. There is no such value for ``mfu``.
    The result also contains the totals ``time``, ``batches``, ``samples`` and ``lengths``.

    Args:
        available_flops: the peak performance of one device in operations per second.
        world_size: the number of devices.
        window_size: rates are computed over this number of most recent updates.
        separator: the string between "device" and the name of a rate.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if available_flops is not None and not (is_number(available_flops) and available_flops > 0):
            raise wrong_value("Throughput", "available_flops", available_flops, "a number above 0", "None")
        for name, value, lowest in (("world_size", world_size, 1), ("window_size", window_size, 2)):
            check_count("Throughput", name, value, lowest, otherwise=lowest)
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._updates: deque[tuple[float, int, int, int | None, int | None]] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Add an update.

        Args:
            time: the seconds since the start. Synchronise the device before you read the clock, because the device
                works asynchronously.
            batches, samples, lengths: the totals on this device since the start.
            flops: the number of operations on this device since the last update.

        Raises:
            ConfigurationError: a total is smaller than at the last update.
        """
        new = (time, batches, samples, lengths, flops)
        if self._updates:
            last = self._updates[-1]
            for name, before, now in zip(("time", "batches", "samples", "lengths"), last, new, strict=False):
                if before is not None and now is not None and now < before:
                    raise ConfigurationError(
                        f"Throughput.update({name}={now}) is less than before, {before}. Pass totals since the start; "
                        "call reset() before a new start."
                    )
        self._updates.append(new)

    def compute(self) -> dict[str, int | float]:
        """Return rates and totals. Before the second update, return only totals."""
        if not self._updates:
            return {}
        first, last = self._updates[0], self._updates[-1]
        totals = dict(zip(("time", "batches", "samples", "lengths"), last, strict=False))
        found: dict[str, Any] = {name: value for name, value in totals.items() if value is not None}
        elapsed = last[0] - first[0]
        if elapsed <= 0:
            return found
        own: dict[str, float] = {
            "batches_per_sec": (last[1] - first[1]) / elapsed,
            "samples_per_sec": (last[2] - first[2]) / elapsed,
        }
        if first[3] is not None and last[3] is not None:
            own["items_per_sec"] = (last[3] - first[3]) / elapsed
        flops = [each[4] for each in list(self._updates)[1:]]
        if all(each is not None for each in flops):
            own["flops_per_sec"] = sum(each or 0 for each in flops) / elapsed
        if self.world_size > 1:
            found |= {name: rate * self.world_size for name, rate in own.items()}
        found |= {f"device{self.separator}{name}": rate for name, rate in own.items()}
        if self.available_flops and "flops_per_sec" in own:
            found[f"device{self.separator}mfu"] = own["flops_per_sec"] / self.available_flops
        return found

    def reset(self) -> None:
        """Remove all updates."""
        self._updates.clear()


class EngineThroughput(Throughput):
    """Computes the throughput of your own loop, and logs it with an Engine's loggers.

    Args:
        engine: the Engine, whose devices, precision and loggers are used.
        kwargs: the arguments of :class:`Throughput`. By default, ``world_size`` and ``available_flops`` come from the
            Engine.
    """

    def __init__(self, engine: Engine, **kwargs: Any) -> None:
        kwargs.setdefault("world_size", engine.world_size)
        if "available_flops" not in kwargs:
            kwargs["available_flops"] = get_available_flops(engine.device, compute_dtype(engine.precision))
        super().__init__(**kwargs)
        self._engine = engine
        self._step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, int | float]:
        """Log and return the result of ``compute``. If ``step`` is ``None``, the step is one more than in the last
        call, and 0 in the first call.
        """
        self._step = self._step + 1 if step is None else step
        found = self.compute(**kwargs)
        self._engine.log_dict(found, step=self._step)
        return found


def compute_dtype(precision: Any) -> torch.dtype:
    """Return the dtype of most operations in this ``precision``."""
    name = str(precision.name)
    if name.startswith("bf16") or "transformer-engine" in name:
        return torch.bfloat16
    return torch.float16 if name.startswith("16") else torch.float64 if name.startswith("64") else torch.float32
