"""Let all ranks run equally many batches, even if their loaders differ in length: see [Note: uneven ends] in
data/samplers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.base.tree import cloned
from drivetrain.errors import ConfigurationError
from drivetrain.loops.loaders import rank_batches
from drivetrain.loops.metrics import metrics_in, set_state, state_of
from drivetrain.loops.run import Run

Batches = Iterator[tuple[Any, bool]]


class UnevenInputs:
    """Adds batches to this rank's pass over a loader until the pass is as long as the longest pass of any rank.

    Args:
        run: the run.
        loader: the loader. If the Trainer has divided the samples among the ranks, the loader's sampler knows the
            weights of the batches.

    Attributes:
        draws: true if the loader itself yields the additional batches; false if this rank repeats its last batch.
            Additional batches do not count.
        factor: the factor of the current batch: see :class:`drivetrain.data.samplers.Share`.
        uneven_from: the index of the first batch whose factor may differ from 1. :meth:`begin` and :meth:`end` need not
            be called for earlier batches.
    """

    def __init__(self, run: Run, loader: Any) -> None:
        self._run = run
        self._shares = rank_batches(loader)
        self._kept: KeptTogether | PaddedBatches | None = None
        self._reachable: list[Any] | None = None  # metric objects of the module and of callbacks
        self._metrics: list[tuple[Any, dict[str, Any]]] | None = None  # (metric, state before a repeated batch)
        self.draws = self._shares is not None
        self.factor = 1.0
        run.window.factor_here = 1.0
        self.uneven_from: float = float("inf") if self._shares is None else self._shares.uneven_from()

    def over(self, batches: Batches, counts: Sequence[float], done: int = 0) -> Batches:
        """Return ``batches``, extended to the largest number of batches of any rank.

        Args:
            batches: this rank's own batches.
            counts: for each rank of the data group (the ranks that divide the data), its number of batches; ``inf``:
                unknown.
            done: the number of batches of this pass that are finished.
        """
        if float("inf") in counts:
            data = self._run.engine.strategy.data
            self._kept = KeptTogether(batches, data.gather_objects, data.ranks)
            self.uneven_from = 0
        elif len(set(counts)) == 1:
            return batches
        else:
            self._kept = PaddedBatches(batches, counts, self._run.engine.strategy.data.index, done)
            self.uneven_from = min(self.uneven_from, *counts)
        return iter(self._kept)

    def repeat(self, batch: Any) -> None:
        """Set the batch that this rank repeats. Called if a pass resumes after this rank's last batch."""
        assert isinstance(self._kept, PaddedBatches)  # all lengths are known
        self._kept.batch = batch

    def begin(self, number: int) -> None:
        """Begin batch ``number`` of the pass. If this rank repeats a batch, its gradients, logged values and metrics
        are discarded.
        """
        self.end()
        if self._shares is not None:
            self.factor = self._shares.factor_of(number)
        elif self._kept is not None:
            self.factor = self._kept.factor
        self._run.window.factor_here = self.factor
        if self.factor == 0:
            self._run.book.mute(True)
            self._run.engine.strategy.repeat_batch(True)
            self._metrics = [(metric, cloned(state_of(metric))) for metric in self._all_metrics()]

    def states_before(self) -> dict[int, dict[str, Any]]:
        """Return the metric objects' states from before a repeated batch, by ``id(metric)``; {} if the current batch is
        not a repetition.
        """
        return {id(metric): state for metric, state in self._metrics or ()}

    def end(self) -> None:
        """End the batch."""
        self._run.window.factor_here = 1.0
        if self._metrics is not None:
            # Cached results of metrics are kept. If only this rank dropped a cached result, this rank would compute the
            # result again, and wait for the other ranks.
            for metric, state in self._metrics:
                set_state(metric, state, forget=False)
            self._metrics = None
            self._run.book.mute(False)
            self._run.engine.strategy.repeat_batch(False)

    def _all_metrics(self) -> list[Any]:
        """Return the metric objects of the module and of callbacks, and the logged metric objects."""
        if self._reachable is None:
            owners = (self._run.module, *self._run.hooks.callbacks)
            self._reachable = [metric for owner in owners for metric in metrics_in(owner).values()]
        found = {id(metric): metric for metric in self._reachable}
        for logged in self._run.book.metrics():
            found |= {id(metric): metric for metric in metrics_in(logged).values()} if id(logged) not in found else {}
        return list(found.values())


class PaddedBatches:
    """Yields equally many pairs ``(batch, is_last)`` on all ranks: a rank with fewer batches repeats its last batch.

    The ranks need not communicate or fetch ahead, because each rank knows all ranks' numbers of batches.

    Args:
        source: this rank's batches, from :func:`drivetrain.data.feed.feed`.
        counts: the number of batches of each rank of the data group, at least 1.
        rank: the index of this rank in the data group.
        done: the number of finished batches of the pass; see :attr:`batch`.

    Attributes:
        factor: as in :class:`KeptTogether`.
        batch: the last batch that was yielded. If this rank resumes after its last batch, the caller must set this
            attribute.
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
                    return  # the loader yielded fewer batches than its length
                self.batch = item[0]
                self.factor = len(self._counts) / sum(count > number for count in self._counts)
            else:
                if number == self._own > self._done:
                    next(self._source, None)  # let the loader end its pass
                self.factor = 0.0
            yield self.batch, number + 1 == longest
        if self._own == longest:
            next(self._source, None)


@dataclass(eq=False, repr=False)
class KeptTogether:
    """Yields ``(batch, is_last)`` while any rank has a batch; the other ranks repeat their last batch.

    Each rank fetches one batch ahead. Before a batch is processed, all ranks therefore know whether any rank has
    another batch.

    Args:
        source: this rank's batches, from :func:`drivetrain.data.feed.feed`.
        gather: a function that returns the values of all ranks, in order. This object calls ``gather`` before the first
            batch, and once for each batch.
        ranks: the global ranks of the data group, for messages; ``None``: 0, 1, ...

    Attributes:
        factor: the factor of the current batch's loss, which is chosen so that repeated batches do not change the mean
            over the ranks. The factor is 0 for a repeated batch. For other batches, the factor is the number of ranks
            divided by the number of ranks that do not repeat a batch.
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
