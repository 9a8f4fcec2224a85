"""What a rank does with a batch that counts for less than others: see [Note: uneven ends] in data/samplers.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain.base.tree import map_leaves
from drivetrain.data.samplers import RankBatches
from drivetrain.data.uneven import KeptTogether, PaddedBatches
from drivetrain.loops.metrics import metrics_in, set_state, state_of
from drivetrain.loops.run import Run

Batches = Iterator[tuple[Any, bool]]


class UnevenInputs:
    """Keeps a pass of one rank in step with the others'.

    Args:
        run: the run.
        loader: what is iterated; it knows what its batches count for if its samples are shared out.

    Attributes:
        draws: a batch that counts for nothing is drawn from the loader too, and not one that is repeated.
        factor: of the current batch: see :class:`drivetrain.data.samplers.Share`.
        uneven_from: the first batch of the pass that may count for another factor than 1: only from there on must
            :meth:`begin` and :meth:`end` be called.
    """

    def __init__(self, run: Run, loader: Any) -> None:
        self._run = run
        self._shares = rank_batches(loader)
        self._kept: KeptTogether | PaddedBatches | None = None
        self._reachable: list[Any] | None = None  # metric objects of the module and of callbacks
        self._metrics: list[tuple[Any, dict[str, Any]]] | None = None  # while a batch is repeated, what they were
        self.draws = self._shares is not None
        self.factor = 1.0
        run.window.factor_here = 1.0
        self.uneven_from: float = float("inf") if self._shares is None else self._shares.uneven_from()

    def over(self, batches: Batches, counts: Sequence[float], done: int = 0) -> Batches:
        """``batches``, as many as the rank with most has.

        Args:
            batches: this rank's own.
            counts: how many each rank of the data group has; ``inf``: unknown.
            done: batches of this pass that are done already.
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
        """The batch that this rank repeats when its pass is resumed behind the last batch of its own."""
        assert isinstance(self._kept, PaddedBatches)  # its length is known, and smaller than another rank's
        self._kept.batch = batch

    def begin(self, number: int) -> None:
        """Batch ``number`` of the pass begins; if it is repeated, its gradients, logs and predictions are discarded."""
        self.end()
        if self._shares is not None:
            self.factor = self._shares.factor_of(number)
        elif self._kept is not None:
            self.factor = self._kept.factor
        self._run.window.factor_here = self.factor
        if self.factor == 0:
            self._run.book.mute(True)
            self._run.engine.strategy.repeat_batch(True)
            self._metrics = [(metric, map_leaves(_copied, state_of(metric))) for metric in self._all_metrics()]

    def end(self) -> None:
        """The batch is done."""
        self._run.window.factor_here = 1.0
        if self._metrics is not None:
            # A metric that this batch did not update keeps the value that it has computed, as on the other ranks: one
            # that computes again waits for all of them.
            for metric, state in self._metrics:
                set_state(metric, state, forget=False)
            self._metrics = None
            self._run.book.mute(False)
            self._run.engine.strategy.repeat_batch(False)

    def _all_metrics(self) -> list[Any]:
        """The metric objects that the module and callbacks hold, and those that were logged."""
        if self._reachable is None:
            owners = (self._run.module, *self._run.hooks.callbacks)
            self._reachable = [metric for owner in owners for metric in metrics_in(owner).values()]
        found = {id(metric): metric for metric in self._reachable}
        for logged in self._run.book.metrics():
            found |= {id(metric): metric for metric in metrics_in(logged).values()} if id(logged) not in found else {}
        return list(found.values())


def _copied(leaf: Any) -> Any:
    return leaf.clone() if hasattr(leaf, "clone") else leaf


def rank_batches(loader: Any) -> RankBatches | None:
    """What shares out the samples of ``loader``, and knows what each batch counts for; ``None`` where nothing does."""
    for place in ("batch_sampler", "sampler"):
        if isinstance(batches := getattr(loader, place, None), RankBatches):
            return batches
    return None
