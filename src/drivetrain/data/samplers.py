"""Split each batch among the processes that train on one data set.

[Note: one order]
All ranks draw the *same* order of samples: the order that rank 0 would draw if rank 0 trained alone. The user's own
sampler draws this order in rank 0's random state. A *global batch* contains the samples of all ranks in one step. Each
rank processes a slice of the global batch. The sequence of global batches therefore depends on the global batch size,
but not on the number of ranks. A loader with ``shuffle=False`` keeps its order.

[Note: uneven ends]
All ranks yield the same number of batches. If the last global batch does not divide evenly, the sizes of the slices
differ by at most one sample. A rank without a sample repeats its last batch, with the weight 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from drivetrain.base.introspect import reads
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.data.batched import Order, as_list, drawn_order, draws_each_once
from drivetrain.data.combined import without_restart
from drivetrain.data.kept import generator_states, set_generator_states
from drivetrain.data.resample import SamplerProxy, drawn_by, replaced
from drivetrain.errors import ConfigurationError

Agree = Callable[[Any], Any]
"""A function that is called on all ranks, and that returns rank 0's argument on each rank."""


class Share(NamedTuple):
    """One rank's part of a global batch.

    Attributes:
        indices: the indices of the samples in this part.
        factor: the number by which this rank's mean loss is multiplied. With these factors, the mean over the ranks is
            the mean over the samples of the global batch. The factor is 1 if all ranks have equally many samples. The
            factor is 0 if this rank has no sample left and repeats its last batch.
    """

    indices: list[Any]
    factor: float


def share(
    loader: Any,
    rank: int,
    world_size: int,
    agree: Agree,
    splits: bool = False,
    pads: bool = False,
    draws: bool | None = None,
) -> DataLoader[Any] | None:
    """Return a copy of ``loader`` that yields this rank's part of each global batch, or ``None`` if the loader is not
    split.

    Only a DataLoader over a map-style dataset is split. Loaders with a DistributedSampler are not split, and results of
    this function are not split again.

    Args:
        loader: the user's loader, which does not change.
        rank: the index of this process in the strategy's data group (the ranks that divide the data).
        world_size: the number of parts.
        agree: broadcasts rank 0's value to all processes.
        splits: whether the loader's batch size is the size of the global batch. If false, it is the size of each rank's
            part.
        pads: whether to repeat the first samples of the order, so that all ranks get equally many samples
            (``drivetrain.parity``).
        draws: whether this process is rank 0 of the job, whose random state determines the order. The default is true
            if ``rank`` is 0. Several processes may have the ``rank`` 0, because processes that share one model get the
            same part.

    Raises:
        ConfigurationError: the loader's sampler has no length, or ``splits`` is true and the loader has no batch
            size.
    """
    if not (place := drawn_by(loader)):
        return None
    drawn = getattr(loader, place)
    inner = getattr(drawn, "sampler", None)
    if isinstance(drawn, (DistributedSampler, RankBatches)) or isinstance(inner, DistributedSampler):
        return None
    if not hasattr(drawn, "__len__"):
        raise ConfigurationError(
            f"The {type(drawn).__name__} of the loader has no length, so the ranks cannot agree where an epoch ends. "
            "Give it __len__, or write Trainer(use_distributed_sampler=False) and share the data out yourself."
        )
    batches: RankBatches
    if _groups_samples(loader):
        size = drawn.batch_size if splits else drawn.batch_size * world_size
        batches = SlicedBatches(drawn.sampler, size, drawn.drop_last, rank, world_size, agree, pads)
    elif splits:
        raise ConfigurationError(
            f"split_batches splits batches of a known size, and this loader's come from {type(drawn).__name__}. "
            "Give the DataLoader a batch_size, or leave split_batches out."
        )
    else:  # a user's batch sampler, or, with batch_size=None, a sampler of single indices
        batches = DealtBatches(drawn, rank, world_size, agree)
    if draws is not None:
        batches.draws = draws
    return replaced(loader, **{place: batches})


def samples_in(loader: Any, batches: int) -> int | None:
    """Return the number of samples in the first ``batches`` batches of ``loader``, on all ranks together.

    Args:
        loader: the loader of one rank. If the loader is a result of :func:`share`, the samples of all ranks are
            counted. Otherwise, only this rank's samples are counted.
        batches: the number of batches on this rank.

    Returns:
        The number of samples, or of batches if the user has passed a batch sampler. It is ``None`` for loaders without
        a sampler.
    """
    if not (place := drawn_by(loader)):
        return None
    drawn = getattr(loader, place)
    if isinstance(drawn, RankBatches):
        return drawn.items_in(batches)
    if not _groups_samples(loader):
        return batches
    there: int = batches * drawn.batch_size
    order = drawn.sampler
    return min(there, len(order)) if isinstance(order, Sized) else there


def order_of(loader: Any) -> dict[str, Any] | None:
    """Return a description of the order in which a loader draws its samples, for comparison with another loader.

    Returns: A dictionary for a DataLoader over a map-style dataset, otherwise ``None``. ``sampler``: the name of the
    sampler's class. ``samples``: the number of samples that the sampler draws, or ``None``. ``dataset``: the length of
    the dataset, or ``None``. ``options``: the sampler's attributes that determine the order. ``own_batches``: whether a
    user's batch sampler makes the batches. Positions then count batches instead of samples.
    """
    if not (place := drawn_by(loader)):
        return None
    drawn = getattr(loader, place)
    if isinstance(drawn, DealtBatches):
        drawn = drawn._sampler
    sampler: Any = getattr(drawn, "sampler", drawn)
    while isinstance(sampler, SamplerProxy):
        sampler = sampler._sampler
    draws_samples = drawn is not sampler or place == "sampler"
    options = {name: getattr(sampler, name, None) for name in ("replacement", "seed", "shuffle")}
    return {
        "sampler": type(sampler).__name__,
        "samples": len(sampler) if draws_samples and isinstance(sampler, Sized) else None,
        "dataset": len(loader.dataset) if isinstance(loader.dataset, Sized) else None,
        "options": {name: value for name, value in options.items() if isinstance(value, (bool, int))},
        "own_batches": place == "batch_sampler" and not (isinstance(drawn, SlicedBatches) or _groups_samples(loader)),
    }


def _groups_samples(loader: Any) -> bool:
    """Whether the batches are groups of ``batch_size`` samples, and do not come from a user's batch sampler.

    A subclass of DataLoader, such as torchdata's, may make the groups with its own subclass of BatchSampler. A loader
    with such groups has a batch size. A loader with a user's batch sampler has no batch size.
    """
    drawn = loader.batch_sampler
    return type(drawn) is BatchSampler or (isinstance(drawn, BatchSampler) and loader.batch_size is not None)


class RankBatches(SamplerProxy):
    """A batch sampler that yields this rank's part of each global batch: see the notes at the beginning of the file.

    Args:
        order: an iterable with a length. The items are samples or complete batches, and are divided among the ranks.
        size: the number of samples or complete batches in a global batch.
        rank, world_size, agree: as for :func:`share`.
    """

    _spare = slice(0, 1)  # a rank that would get nothing of the first global batch gets this slice, with the factor 0

    def __init__(self, order: Any, size: int, rank: int, world_size: int, agree: Agree) -> None:
        super().__init__(order)
        self._size, self._rank, self.world_size, self._agree = size, rank, world_size, agree
        self.draws = rank == 0
        """Whether this process draws the order with its own random state."""
        self.divided_from = 0
        """The number of samples or complete batches that an interrupted run has already processed, if its global
        batches had another size. The resumed pass begins after these items, which count as at least one batch.
        """
        self._drop_last = self._pads = False

    def shares(self) -> Iterator[Share]:
        """Yield this rank's share of each global batch."""
        order = self._order()
        if self._pads:
            order = _padded(iter(as_list(order) if isinstance(order, Tensor) else order), self._total())
        last: list[Any] = []
        batch: list[Any] | Order
        for start, stop in self._bounds():
            if isinstance(order, (Tensor, range)):  # read only this rank's indices
                batch = order[start:stop]
            else:
                batch = list(itertools.islice(order, stop - start))
            begin, end = slice_of(len(batch), self._rank, self.world_size)
            last = as_list(batch[begin:end]) or last or as_list(batch[self._spare])
            yield Share(last, self._factor_of(stop - start))

    def __len__(self) -> int:
        first, left = self.batches_before(), self._total() - self.divided_from
        if self._drop_last:
            return first + max(left // self._size, int(first > 0))  # a resumed pass has at least one batch
        return first - (-left // self._size)

    def _total(self) -> int:
        """Return the number of items (samples or complete batches) of all ranks together."""
        return len(self._sampler)

    def batches_before(self) -> int:
        """Return the number of batches in the first :attr:`divided_from` items, which count as at least one batch."""
        return max(self.divided_from // self._size, 1) if self.divided_from else 0

    def items_in(self, batches: int) -> int:
        """Return the number of samples, or of complete batches, in the first ``batches`` global batches."""
        first = self.batches_before()
        there = batches * self._size if batches < first else self.divided_from + (batches - first) * self._size
        return min(there, self._total())

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Yield where each global batch begins and ends, as positions in the order."""
        first, total, start = self.batches_before(), self._total(), 0
        for number in range(1, len(self) + 1):
            stop = number * self._size if number < first else self.divided_from + (number - first) * self._size
            yield start, (start := min(stop, total))

    def uneven_from(self) -> float:
        """Return the index of the first global batch whose parts may have unequal sizes, or ``inf`` if there is no such
        batch.
        """
        if self._size % self.world_size:
            return 0
        whole, rest = divmod(self._total() - self.divided_from, self._size)
        return self.batches_before() + whole if rest else float("inf")

    def factor_of(self, number: int) -> float:
        """Return the factor of global batch ``number``, counted from 0: see :class:`Share`."""
        return self._factor_of(self.items_in(number + 1) - self.items_in(number))

    def _factor_of(self, items: int) -> float:
        begin, end = slice_of(items, self._rank, self.world_size)
        return (end - begin) * self.world_size / items

    def __iter__(self) -> Iterator[list[Any]]:
        return (share.indices for share in self.shares())

    def _order(self) -> Iterator[Any] | Order:
        """Return the order that rank 0 draws, as a range or a tensor of indices if possible, else as an iterator."""
        if type(self._sampler) is SequentialSampler:
            return range(len(self._sampler))
        if isinstance(self._sampler, (list, tuple, range)):
            return iter(self._sampler)
        generators = [g for g in (getattr(self._sampler, "generator", None),) if isinstance(g, torch.Generator)]
        state, drawing = self._agree((rng_state(), generator_states(generators)))
        if self.draws:
            return self._drawn()
        own = rng_state()
        # Several ranks may have part 0 of the data. A rank that had rank 0's random state before the draw also has rank
        # 0's state after the draw. All these ranks then, for example, seed their workers with the same number.
        in_step = self._rank == 0 and _alike(own, state)
        set_rng_state(state)
        set_generator_states(generators, drawing)
        try:
            return self._drawn()
        finally:
            if not in_step:
                set_rng_state(own)

    def _drawn(self) -> Iterator[Any] | Order:
        if draws_each_once(self._sampler) and self._sampler.generator is None:
            return drawn_order(self._sampler)
        order = without_restart(iter(self._sampler))
        if type(self._sampler) is RandomSampler:
            # The sampler draws a seed for its generator when the first index is requested. Therefore request the first
            # index here.
            first = list(itertools.islice(order, 1))
            return itertools.chain(first, order)
        return iter(list(order))  # draw all indices now, while the generators have rank 0's random state


def _alike(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states of the host's random generators are equal."""
    same = torch.equal(state["torch"], other["torch"])
    return same and all(state.get(name) == other.get(name) for name in ("python", "numpy"))


class SlicedBatches(RankBatches):
    """This rank's slices of global batches. The samples come from a sampler of single samples.

    Args:
        order: a sampler of single samples, with a length.
        size: the number of samples in a global batch.
        drop_last: whether to leave out the last global batch if it is incomplete.
        rank, world_size, agree, pads: as for :func:`share`.
    """

    def __init__(
        self, order: Any, size: int, drop_last: bool, rank: int, world_size: int, agree: Agree, pads: bool
    ) -> None:
        super().__init__(order, size, rank, world_size, agree)
        if size < world_size:
            raise ConfigurationError(
                f"A batch size of {size} cannot be split over {world_size} processes. Write batch_size={world_size} "
                "or more, or leave split_batches out."
            )
        self._drop_last, self._pads = drop_last, pads
        self.batch_size = size // world_size  # the batch size of one rank
        self.drop_last = drop_last

    sampler: Any = reads("_sampler", "The sampler of the common order.")

    def _total(self) -> int:
        total = len(self._sampler)
        return -(-total // self.world_size) * self.world_size if self._pads else total


class DealtBatches(RankBatches):
    """Deals complete batches of a user's batch sampler to the ranks, one after another.

    Args:
        order: an iterable with a length. Its items are lists of indices, or single indices for a loader with
            ``batch_size=None``.
        rank, world_size, agree: as for :func:`share`.
    """

    _spare = slice(-1, None)

    def __init__(self, order: Any, rank: int, world_size: int, agree: Agree) -> None:
        super().__init__(order, world_size, rank, world_size, agree)

    def shares(self) -> Iterator[Share]:
        return (Share(indices[0], factor) for indices, factor in super().shares())


def slice_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the part of ``rank`` begins and ends, if ``count`` items are divided as evenly as possible."""
    each, more = divmod(count, world_size)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


def _padded(order: Iterator[Any], total: int) -> Iterator[Any]:
    """Yield ``total`` items: the items of ``order``, then its first items again."""
    kept = list(order)
    return itertools.islice(itertools.cycle(kept), total) if kept else iter(())
