"""``fabric.utilities.distributed``: any sampler, shared out to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from drivetrain.errors import ConfigurationError


class _Drawn(Dataset[Any]):
    """What a sampler draws in one epoch, as a dataset, whose indices a DistributedSampler shares out."""

    def __init__(self, sampler: Any) -> None:
        if not isinstance(sampler, Sized):
            raise ConfigurationError(
                f"DistributedSamplerWrapper got a {type(sampler).__name__} without a length, so the ranks cannot agree "
                "where an epoch ends. Give it __len__."
            )
        if len(sampler) == float("inf"):
            raise ConfigurationError(
                "DistributedSamplerWrapper got a sampler with an infinite length. Let __len__ return the samples of an "
                "epoch."
            )
        self.sampler: Any = sampler
        self.order: list[Any] = []

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: int) -> Any:
        return self.order[index]


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """Gives each rank its part of what ``sampler`` draws; every rank draws all of it, from the same seed.

    The Trainer and the Engine leave a loader with this sampler as it is. For loaders without it they share the samples
    out themselves, from the order that rank 0 draws.

    Args:
        sampler: with a length.
        args, kwargs: of torch's ``DistributedSampler``, after its dataset: ``num_replicas``, ``rank``, ``drop_last``,
            and ``shuffle=False``, without which it shuffles once more what the sampler has drawn.
    """

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        self._drawn = _Drawn(sampler)
        super().__init__(self._drawn, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self._drawn.order = list(self._drawn.sampler)
        return (self._drawn[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the sampler too, if it takes one."""
        super().set_epoch(epoch)
        if callable(own := getattr(self._drawn.sampler, "set_epoch", None)):
            own(epoch)
