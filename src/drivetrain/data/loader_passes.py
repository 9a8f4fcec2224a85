"""Iterate one training loader, pass by pass, so that a run can resume in the middle of a pass.

This file contains the base class, which works for any loader, and a class for loaders with ``state_dict``.
``sampled_passes.py`` contains the class for DataLoaders with a sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch

from drivetrain.base.restoring import COUNT, Form, check_generators, check_rng_state, count, restoring
from drivetrain.base.seed import isolate_rng, rng_state, set_rng_state
from drivetrain.data import kept
from drivetrain.data.combined import without_restart
from drivetrain.data.stateful import between_passes, leave, rest_of_pass
from drivetrain.errors import CheckpointError

_INF = float("inf")
Position = dict[str, Any]
"""The position of a pass, as plain data."""

POSITION: Form = {
    "given": COUNT, "begun": COUNT, "ended": bool, "generators": check_generators, "rng?": check_rng_state,
    "workers?": {count: (None, kept.check_worker_state)}, "workers_after?": {count: (None, kept.check_worker_state)},
    "seed?": COUNT,
}  # fmt: skip
"""The types of the entries of one loader's position. ``loops/restart_checks.py`` checks the random states from the
start of the pass.
"""


class Passes:
    """The passes over one loader. An epoch has one pass, or several for a loader in a CombinedLoader.

    To resume a pass, this class iterates the loader from its start, and discards the finished batches. Subclasses
    resume in other ways. The remaining batches equal the batches of the interrupted pass if batches depend only on
    random numbers that the loader itself draws.

    Args:
        loader: any re-iterable object.

    Attributes:
        loader: the user's loader.
        limit: the maximum number of batches in a pass.
        fetches_here: whether fetching a batch may draw from this process's random generators.
        flight: while a batch is fetched ahead, the position before this batch, otherwise ``None``.
        can_repeat: whether :meth:`last_batch` works.
        seconds_to_first: the seconds from the start of the workers to the pass's first batch, or 0 if there are no
            workers, or if this was not measured.
    """

    can_repeat = True
    seconds_to_first = 0.0

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.flight: Position | None = None
        self.limit: float = _INF
        self._workers = num_workers(loader)
        self.fetches_here = self._workers == 0
        self._generators = kept.generators_of(loader)
        self._given = 0  # the number of batches that the current pass has yielded
        self._begun = 0  # the number of passes that have begun in the current epoch
        self._ended = False
        self._before: dict[str, Any] = {}  # the random state at the start of the pass
        self._prepared: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def start_epoch(self) -> None:
        """Mark the next pass as the first of an epoch."""
        self._begun, self.flight = int(self._prepared is not None), None

    def close(self) -> None:
        """Stop persistent workers."""

    # ---- a pass ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._prepared is not None:
            source, self._prepared = self._prepared, None
        else:
            source = self._new_pass()
        if self.limit != _INF:
            source = islice(source, max(int(self.limit) - self._given, 0))
        return self._count(source)

    def _new_pass(self) -> Iterator[Any]:
        self._leave()
        self._given, self._ended = 0, False
        self._begun += 1
        self._before = random_state(self._generators)
        return self._start()

    def start_early(self, takes_first: bool) -> None:
        """Start the next pass early. If ``takes_first`` is true, also fetch its first batch. The next iteration
        continues this pass.
        """
        source = self._new_pass()
        self._prepared = chain(list(islice(source, int(takes_first))), source)

    def _leave(self) -> None:
        """End the previous pass, which may have been abandoned. This method is called before a new pass begins."""

    def _start(self) -> Iterator[Any]:
        return without_restart(iter(self.loader))

    def _count(self, source: Iterator[Any]) -> Iterator[Any]:
        for self._given, batch in enumerate(source, self._given + 1):  # noqa: B020
            yield batch
        self._ended = True

    # ---- its position ------------------------------------------------------------------------------------------------

    def position(self, states: bool = True) -> Position:
        """Return the position of the pass. If ``states`` is false, leave out the result of the loader's
        ``state_dict``.
        """
        return {
            "given": self._given,
            "begun": self._begun,
            "ended": self._ended,
            "before": self._before,
            "generators": kept.generator_states(self._generators),
        }

    def carry_over(self, position: Position) -> None:
        """Restore the states that the loader keeps between passes: the user's generators, and persistent workers."""
        # the position of a CombinedLoader has no entry "given"
        if "given" in position:
            kept.set_generator_states(self._generators, position["generators"])
            self._carry_over(position)

    def _carry_over(self, position: Position) -> None:
        """The part of :meth:`carry_over` that subclasses override."""

    def resume(self, position: Position) -> None:
        """Let the next iteration continue at ``position``. This call advances the random generators, so the caller must
        set them afterwards.

        Raises:
            CheckpointError: the loader yields fewer batches than the position counts, or cannot restore its state.
        """
        as_many = len(position.get("generators", ())) == len(self._generators)
        if "given" not in position or not as_many or not self._fits(position):
            raise CheckpointError(
                f"The checkpoint was saved with another kind of training loader, and a {type(self.loader).__name__} "
                "cannot continue at its position. Resume with the loader it was saved with."
            )
        self._given, self._begun, self._ended = position["given"], position["begun"], position["ended"]
        self._before = position["before"]
        if self._ended:
            self._prepared = iter(())
            self.carry_over(position)
            return
        if not self._before:
            raise CheckpointError("The checkpoint lacks the random state in which its pass began. Use another one.")
        set_random_state(self._generators, self._before)
        self._resume(position)

    def _fits(self, position: Position) -> bool:
        """Whether ``position`` was saved for a loader of this kind."""
        return "loader" not in position

    def _resume(self, position: Position) -> None:
        """Prepare the rest of the pass. The caller has restored the random state from the start of the interrupted
        pass.
        """
        self._prepared = without_restart(iter(self.loader))
        self._discard(self._prepared, 0, position["given"])

    def _discard(self, source: Iterator[Any], given: int, done: int) -> None:
        """Fetch batches of ``source`` and discard them, until the pass has yielded ``done`` batches. ``source`` begins
        after the first ``given`` batches.
        """
        self._given = given
        for item in islice(source, done - given):
            self._discarded(item)
            self._given += 1
        if self._given < done:
            raise CheckpointError(
                f"The checkpoint was saved after {done} batches of an epoch, and the loader "
                f"{type(self.loader).__name__} gave only {self._given}. Resume with the data it was saved with."
            )

    def _discarded(self, item: Any) -> None:
        """Called when a batch was fetched for a second time."""

    def last_batch(self, position: Position) -> Any:
        """Fetch again and return the last batch before ``position``. The random generators do not change.

        If there are workers, the batch may have other random augmentations than the original batch.
        """
        with isolate_rng():
            self.resume({**position, "given": position["given"] - 1, "ended": False})
            batch = next(iter(self))
        self.close()
        return batch


class StatefulPasses(Passes):
    """Passes over a loader with ``state_dict`` and ``load_state_dict``, which saves its position itself.

    If a different number of ranks saved the position, the position may lack the loader's state. The finished batches
    are then fetched again.
    """

    can_repeat = False  # a stateful loader cannot go back by one batch

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._name = f"the training loader ({type(loader).__name__})"
        self._left: Iterator[Any] | None = None  # the rest of a resumed pass
        # The number of finished batches and the state that was loaded. Until the next batch, position() returns this
        # state, because the state_dict() of some loaders returns another state after load_state_dict().
        self._loaded: tuple[int, Any] | None = None

    def _leave(self) -> None:
        if self._left is not None:
            with isolate_rng(), kept.generators_kept([self.loader]):
                leave(self._left)
        self._left = self._loaded = None

    def position(self, states: bool = True) -> Position:
        loaded = self._loaded if self._loaded is not None and self._loaded[0] == self._given else None
        state = None if not states else self.loader.state_dict() if loaded is None else loaded[1]
        return {**super().position(states), "loader": state, "num_workers": self._workers}

    def _fits(self, position: Position) -> bool:
        return "loader" in position

    def _carry_over(self, position: Position) -> None:
        if position.get("loader") is None:
            return
        # a checkpoint that is saved before the next pass begins contains this position
        self._given, self._ended, self._before = position["given"], position["ended"], position["before"]
        given, ended = self._given, self._ended
        whole = given >= sized_length(self.loader, _INF) or (ended and given < self.limit)
        with isolate_rng(), kept.generators_kept([self.loader]), restoring(self._name):
            self._left = between_passes(self.loader, position["loader"], given > 0 or ended, whole)
        self._loaded = given, position["loader"]

    def _resume(self, position: Position) -> None:
        if position["loader"] is None:
            super()._resume(position)
            return
        whole = self._given >= sized_length(self.loader, _INF)
        with restoring(self._name):
            self._left = rest_of_pass(self.loader, position["loader"], whole)
        self._loaded = self._given, position["loader"]
        self._prepared = without_restart(self._left)


def sized_length(loader: Any, unsized: float | None = None) -> Any:
    """Return ``len(loader)``, or ``unsized`` if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return unsized


def num_workers(loader: Any) -> int:
    """Return the loader's number of worker processes."""
    workers = getattr(loader, "num_workers", 0)
    return workers if isinstance(workers, int) else 0


def random_state(generators: list[torch.Generator]) -> dict[str, Any]:
    """Return the state of the global generators and of ``generators``."""
    return {**rng_state(), "generators": kept.generator_states(generators)}


def set_random_state(generators: list[torch.Generator], state: dict[str, Any]) -> None:
    """Restore a result of :func:`random_state`."""
    kept.set_generator_states(generators, state["generators"], strict=True)
    set_rng_state(state)
