"""Uneven inputs: give all ranks the same number of batches, from loaders of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.errors import ConfigurationError


class PaddedBatches:
    """``(batch, is_last)`` as often as the rank with most batches has one; the others repeat their last batch.

    The number of batches of each rank is known, so nothing is asked and nothing is fetched ahead.

    Args:
        source: this rank's own, as :func:`drivetrain.data.feed.feed` yields them.
        counts: the number of batches of each rank of the data group, at least 1.
        rank: this one's place in it.
        done: batches of the pass that are done already; see :attr:`batch`.

    Attributes:
        factor: as of :class:`KeptTogether`.
        batch: the one that was given last. A rank that resumes behind its last batch must be given it.
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
                    return  # the loader gave fewer than its length promised, and a warning has said so
                self.batch = item[0]
                self.factor = len(self._counts) / sum(count > number for count in self._counts)
            else:
                if number == self._own > self._done:
                    next(self._source, None)  # the loader is asked for its end where its last batch is done
                self.factor = 0.0
            yield self.batch, number + 1 == longest
        if self._own == longest:
            next(self._source, None)


@dataclass(eq=False, repr=False)
class KeptTogether:
    """``(batch, is_last)`` for as long as any rank has a batch; a rank with nothing left repeats its last one.

    Each rank fetches one batch ahead, so that all know whether there is a next one before the current one is worked on.

    Args:
        source: this rank's own, as :func:`drivetrain.data.feed.feed` yields them.
        gather: this rank's answer on every rank, in order; called once per batch, and once more.
        ranks: their global ranks, for messages; ``None``: they count from 0.

    Attributes:
        factor: of the batch that was given last, so that the mean over the ranks is that over those that have one: 0 if
            it is repeated, else the number of ranks for each that has a batch of its own.
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
                "Give every rank at least one batch."
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
