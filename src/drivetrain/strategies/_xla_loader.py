"""Loaders whose batches torch_xla uploads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from drivetrain.base.packages import torch_xla, xla_model, xla_parallel_loader
from drivetrain.data.combined import without_restart

_KEPT = ("dataset", "batch_sampler", "sampler", "generator", "num_workers", "batch_size", "drop_last")


def on_device(loader: Any, device: torch.device) -> Any:
    """Return ``loader`` as a torch_xla ``MpDeviceLoader``; an ``MpDeviceLoader`` is returned unchanged.

    It has the attributes of a DataLoader that describe the position of a pass. Each request for a batch executes the
    operations recorded before. With workers, torch_xla's threads upload batches ahead. Without workers, each batch is
    fetched when it is requested, because fetching may draw from this process's random generators.
    """
    kind = _device_loader()
    if isinstance(loader, kind.__mro__[1]):
        return loader
    wrapped = kind(loader, device)
    for name in _KEPT:
        if hasattr(loader, name):
            setattr(wrapped, name, getattr(loader, name))
    return wrapped


@functools.cache
def _device_loader() -> Any:
    class DeviceLoader(xla_parallel_loader.MpDeviceLoader):  # type: ignore[misc]  # torch_xla has no types
        """Batches of a loader on an XLA device."""

        def __iter__(self) -> Iterator[Any]:
            self.close()
            if getattr(self._loader, "num_workers", 0) > 0:
                return self._uploaded_ahead()
            return self._one_by_one()

        def _one_by_one(self) -> Iterator[Any]:
            for batch in self._loader:
                torch_xla.sync(reset_scope=False)
                yield xla_model.send_cpu_data_to_device([batch], self._device)[0]
            torch_xla.sync(reset_scope=False)

        def _uploaded_ahead(self) -> Iterator[Any]:
            source = without_restart(iter(self._loader))
            # first fetched in this thread: samplers draw random numbers and call collectives
            first = next(source, _END)
            if first is _END:
                return iter(())
            self._parallel_loader = xla_parallel_loader.ParallelLoader(
                chain([first], source), [self._device], **self._parallel_loader_kwargs
            )
            return self._parallel_loader.per_device_loader(self._device)

        def close(self) -> None:
            """Stop the upload threads if the loop left a pass early."""
            if self._parallel_loader is not None:
                self._parallel_loader.close()
                self._parallel_loader = None

    return DeviceLoader


_END = object()
