"""Uneven inputs: the same number of batches on all ranks, from loaders of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.errors import ConfigurationError


class PaddedBatches:
    """Yields ``(batch, is_last)`` as often as the rank with most batches; the other ranks repeat their last batch.

    Each rank's number of batches is known, so the ranks do not communicate and nothing is fetched ahead.

    Args:
        source: this rank's batches, from :func:`drivetrain.data.feed.feed`.
        counts: the number of batches of each rank of the data group, at least 1.
        rank: the index of this rank in the data group.
        done: the number of finished batches of the pass; see :attr:`batch`.

    Attributes:
        factor: as in :class:`KeptTogether`.
        batch: the last batch that was yielded. Must be set if a rank resumes after its own last batch.
    """

    def __init__(self, source: Iterator[tuple[Any, bool]], counts: Sequence[float], rank: int, done: int = 0) -> None:
        self._source = source
        self._counts = counts
        self._own = counts[rank]
        self._done = done
        self.factor = 1.0
        self.batch: Any = None

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        longest = int(max(self._counts))
        for number in range(self._done, longest):
            if number < self._own:
                item = next(self._source, None)
                if item is None:
                    return  # the loader yielded fewer batches than its length; a warning was issued
                self.batch = item[0]
                self.factor = len(self._counts) / sum(count > number for count in self._counts)
            else:
                if number == self._own > self._done:
                    next(self._source, None)  # exhaust the loader after its last batch
                self.factor = 0.0
            yield self.batch, number + 1 == longest
        if self._own == longest:
            next(self._source, None)


@dataclass(eq=False, repr=False)
class KeptTogether:
    """Yields ``(batch, is_last)`` while any rank has a batch; a rank without further batches repeats its last one.

    Each rank fetches one batch ahead, so that all ranks know whether there is a next batch before they process the
    current one.

    Args:
        source: this rank's batches, from :func:`drivetrain.data.feed.feed`.
        gather: returns every rank's answer, in order; called once per batch, and once more.
        ranks: the global ranks, for messages; ``None``: 0, 1, ...

    Attributes:
        factor: the factor of the current batch, with which the mean over all ranks becomes the mean over the ranks with
            a batch of their own: 0 if the batch is repeated, otherwise the number of ranks divided by the number of
            ranks with a batch of their own.
    """

    source: Iterator[tuple[Any, bool]]
    gather: Callable[[bool], list[bool]]
    ranks: Sequence[int] | None = None
    factor: float = field(default=1.0, init=False)

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        current = next(self.source, None)
        having = self.gather(current is not None)
        if any(having) and not all(having):
            ranks = range(len(having)) if self.ranks is None else self.ranks
            without = [rank for rank, has in zip(ranks, having, strict=True) if not has]
            raise ConfigurationError(
                f"The loader gave no batch at all on rank {', '.join(map(str, without))}, and others have some. "
                "Give every rank at least one batch. [DT1061]"
            )
        while current is not None:
            following = next(self.source, None)
            self.factor = len(having) / sum(having)
            having = self.gather(following is not None)
            yield current[0], not any(having)
            while following is None and any(having):
                self.factor = 0.0
                having = self.gather(False)
                yield current[0], not any(having)
            current = following
