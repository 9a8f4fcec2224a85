"""Record the indices of the samples in each batch, for callbacks that write predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from drivetrain.data.batched import start_pass
from drivetrain.data.combined import CombinedLoader, without_restart
from drivetrain.data.resample import SamplerProxy, drawn_by, replaced
from drivetrain.errors import ConfigurationError


class RecordedIndices:
    """Yields a loader's batches, and records the dataset indices of each batch's samples.

    Workers fetch ahead, so the sampler draws indices long before their batch arrives. This class records each draw, and
    returns the records in the order of the draws. It iterates a copy of the loader with ``in_order=True``, so that
    batches arrive in this order, too.

    The user's loader does not change. The copy has the loader's dataset, samplers and generator. If
    ``persistent_workers`` is set, the copy has its own workers, which stop when this object is freed.

    Only one pass at a time is possible. Subclasses of DataLoader whose ``__iter__`` drops or splits batches are not
    supported.

    Args:
        loader: a DataLoader over a map-style dataset. For any other loader, the lists of sample indices are empty. For
            a CombinedLoader, the batches are yielded without ``batch_idx`` and ``dataloader_idx``.
        pins: the argument ``pins`` of :func:`drivetrain.data.batched.start_pass`.
    """

    def __init__(self, loader: Any, pins: bool = False) -> None:
        self.loader = loader
        self._pins = pins
        self._given: deque[list[Any]] = deque()
        self._recorder: _Recorder | None = None
        self._source = loader
        if place := drawn_by(loader):
            self._recorder = _Recorder(getattr(loader, place), batched=place == "batch_sampler")
            self._source = replaced(loader, **{place: self._recorder, "in_order": True})

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._given.clear()
        for batch in start_pass(self._source, self._pins):
            if self._recorder is None:
                self._given.append([])
            elif self._recorder.drawn:
                self._given.append(self._recorder.drawn.popleft())
            else:
                raise ConfigurationError(
                    f"The loader {type(self.loader).__name__} yielded more batches than its sampler drew, so it is "
                    "unknown which samples they contain. Let its __iter__ yield each batch once."
                )
            yield batch[0] if isinstance(self.loader, CombinedLoader) else batch

    def pop(self) -> list[Any]:
        """Return the sample indices of a batch. Call this method once per batch, in the order of the batches.

        If ``batch_size=None``, each sample is a batch, and the list contains the sample's index.

        Raises:
            ConfigurationError: the indices of all yielded batches were already returned.
        """
        if not self._given:
            raise ConfigurationError(
                "RecordedIndices.pop() was called more often than there were batches. Call it once per batch, after it."
            )
        return self._given.popleft()


class _Recorder(SamplerProxy):
    """Wraps a sampler and records its draws. In all else, it behaves like the wrapped sampler."""

    def __init__(self, sampler: Any, batched: bool) -> None:
        super().__init__(sampler)
        self._batched = batched
        self.drawn: deque[list[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()  # drop the draws of an abandoned pass
        # created here and not in the generator, because creating the iterator may draw a random number
        return self._record(without_restart(iter(self._sampler)))

    def _record(self, draws: Iterator[Any]) -> Iterator[Any]:
        for indices in draws:
            if self._batched and isinstance(indices, Iterator):
                indices = list(indices)  # an iterator can be read only once
            several = self._batched or isinstance(indices, list)  # a tuple may be one index
            self.drawn.append([_plain(index) for index in (indices if several else [indices])])
            yield indices


def _plain(index: Any) -> Any:
    return index.item() if isinstance(index, Tensor) and index.numel() == 1 else index
