"""Copy a user's loader with another sampler, without shuffling, or without dropping the last batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.torch_private import ITERATOR
from drivetrain.errors import ConfigurationError

L = TypeVar("L", bound=DataLoader[Any])


class SamplerProxy:
    """Replaces a sampler or batch sampler, and behaves like the original except for iteration."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def slices(self, dataset: Any) -> Iterator[Any] | None:
        """Return what :func:`drivetrain.data.batched.slices` returns for this sampler, or ``None`` if this object needs
        single indices.
        """
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)  # there are no attributes yet during a copy
        return getattr(self._sampler, name)


def with_sampler(loader: L, sampler: Sampler[Any] | Iterable[Any]) -> L:
    """Return a copy of ``loader`` that draws sample indices from ``sampler``.

    This function does not call the constructor of the loader's class, so the constructor may have any arguments. The
    copy has the same attributes as the original, including dataset, batch size, ``drop_last``, ``collate_fn``,
    generator and worker settings, but no running workers. The original does not change.

    Args:
        loader: a DataLoader over a map-style dataset. The loader's batch sampler is copied, and the argument
            ``sampler`` becomes the attribute ``sampler`` of this copy. If the user passed a batch sampler as the
            loader's ``sampler``, with ``batch_size=None``, this batch sampler is copied.
        sampler: yields indices of single samples.

    Raises:
        ConfigurationError: the loader's batch sampler has no attribute ``sampler`` that can be set.
    """
    if loader.batch_sampler is not None:
        return replaced(loader, sampler=sampler, batch_sampler=_drawing_from(loader.batch_sampler, sampler))
    if isinstance(loader.sampler, BatchSampler):
        return replaced(loader, sampler=_drawing_from(loader.sampler, sampler))
    return replaced(loader, sampler=sampler)


def without_shuffle(loader: Any) -> Any:
    """Return ``loader`` if it draws its samples in a fixed order. Otherwise warn, and return a copy with a fixed order.

    In the copy, a DistributedSampler keeps its part of the data, but does not shuffle. In place of any other sampler,
    the copy has a SequentialSampler over the complete dataset. A list of indices has a fixed order, too. Loaders
    without a sampler, such as loaders over an iterable-style dataset, are returned unchanged.

    Raises:
        ConfigurationError: the loader's batch sampler has no attribute ``sampler`` that can be set.
    """
    if not (place := drawn_by(loader)):
        return loader
    drawn_from: Any = getattr(loader, place)
    batches = place == "batch_sampler" or isinstance(drawn_from, BatchSampler)
    if batches and getattr(drawn_from, "sampler", None) is not None:
        drawn_from = drawn_from.sampler
    if _is_fixed(drawn_from):
        return loader
    if isinstance(drawn_from, DistributedSampler):
        ordered: Sampler[Any] = copy.copy(drawn_from)
        ordered.shuffle = False  # type: ignore[attr-defined]
    else:
        ordered = SequentialSampler(loader.dataset)
    in_order = with_sampler(loader, ordered)
    rank_zero_warn(
        f"The loader {type(loader).__name__} draws its samples with a {type(drawn_from).__name__}, but every epoch "
        "must see the same batches. They are drawn in order instead. Write shuffle=False to avoid this warning."
    )
    return in_order


def with_every_sample(loader: Any) -> Any:
    """If ``loader`` drops an incomplete last batch, return a copy that yields this batch. Otherwise, return ``loader``.

    Only a DataLoader with a batch sampler is copied. All other loaders are returned unchanged.
    """
    if not isinstance(loader, DataLoader) or not getattr(loader.batch_sampler, "drop_last", False):
        return loader
    every: Any = copy.copy(loader.batch_sampler)
    try:
        every.drop_last = False
    except AttributeError:  # ``drop_last`` may be a property
        return loader
    return replaced(loader, batch_sampler=every, drop_last=False)


def drawn_by(loader: Any) -> str:
    """Return the name of the attribute that draws sample indices: "batch_sampler", or "sampler" if there is no batch
    sampler.

    The result is "" for a loader that is no DataLoader, or that has an iterable-style dataset.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return ""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def draws_samples(loader: Any) -> bool:
    """Whether ``loader`` is a DataLoader that iterates with torch's own methods and uses a sampler."""
    return drawn_by(loader) != "" and type(loader).__iter__ is DataLoader.__iter__


def replaced(loader: L, **attributes: Any) -> L:
    """Return a copy of ``loader`` with new values of ``attributes``, and without running workers. Attributes that a
    DataLoader protects from changes are also replaced.
    """
    copied = copy.copy(loader)
    for name, value in {**attributes, ITERATOR: None}.items():
        object.__setattr__(copied, name, value)
    return copied


def _drawing_from(batch_sampler: Any, sampler: Any) -> Any:
    copied = copy.copy(batch_sampler)
    try:
        if getattr(batch_sampler, "sampler", None) is None:
            raise AttributeError("sampler")
        copied.sampler = sampler
    except AttributeError as error:
        raise ConfigurationError(
            f"The batch sampler {type(batch_sampler).__name__} has no attribute 'sampler' that can be set, so it "
            "cannot draw from another sampler. Let it draw its indices from self.sampler, or give the DataLoader "
            "a batch_size instead."
        ) from error
    return copied


def _is_fixed(sampler: Any) -> bool:
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return isinstance(sampler, (SequentialSampler, list, tuple, range))
