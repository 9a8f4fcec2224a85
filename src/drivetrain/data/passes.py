"""Passes over the training loader, each of which can be taken up again in its middle, exactly.

[Note: how a pass is taken up]
A loader with ``state_dict`` and ``load_state_dict`` knows where it is. A torch DataLoader over a map-style dataset is
started from the random state in which the interrupted pass was started, so that its sampler draws the same order; the
batches that are done are skipped in the sampler, without fetching them. Anything else is iterated again from its
start, and the batches that are done are thrown away: that is exact if what it gives depends on its own draws alone.

[Note: workers]
Each batch brings along the state of its worker's random generators, if that has changed. Torch deals batches to
workers in turn, so a pass of W workers is taken up at the start of a round of W batches: every worker begins with the
state that it had there, and the few batches of the round that were done already are fetched again and thrown away.

Workers that persist go on with their generators in the next pass. If a pass is left early, they have fetched ahead,
and what they drew for it comes before the next pass: so these batches are received and thrown away, for the states
that they bring along. A run that resumes between the two passes lets its workers fetch the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.base.restoring import restoring
from drivetrain.base.seed import isolate_rng, rng_state, set_rng_state
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.kept import generators_kept, generators_of, set_worker_state, worker_state
from drivetrain.data.resample import SamplerProxy, replaced
from drivetrain.data.stateful import between_passes, is_stateful, leave, rest_of_pass
from drivetrain.errors import CheckpointError

_INF = float("inf")
Mark = dict[str, Any]
"""Where a pass is, as plain data."""


class Passes:
    """One loader, iterated once per epoch (more often inside a combined one).

    Args:
        loader: anything that can be iterated anew. It stays as it is; of a DataLoader a copy is iterated that shares
            its dataset, its samplers and its generator.

    Attributes:
        loader: the user's own.
        limit: how many batches a pass gives at most.
        fetches_here: whether fetching a batch may draw from this process's random generators.
        flight: where the pass was before a batch that is fetched ahead; ``None`` while there is none.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.flight: Mark | None = None
        self.limit: float = _INF
        self._workers = _num_workers(loader)
        self.fetches_here = self._workers == 0
        self._stateful = is_stateful(loader)
        self._generators = generators_of(loader)
        self._persists = bool(getattr(loader, "persistent_workers", False))
        self._draws: _Draws | None = None
        self._source = loader
        self._seeds: _Seeds | None = None
        if not self._stateful and _draws_samples(loader):
            place = "sampler" if loader.batch_sampler is None else "batch_sampler"
            self._draws = _Draws(getattr(loader, place), self._generators)
            changes: dict[str, Any] = {place: self._draws}
            if self._workers:
                self._seeds = _Seeds(loader.worker_init_fn)
                changes |= {"collate_fn": _Carrying(loader.collate_fn), "worker_init_fn": self._seeds}
            self._source = replaced(loader, **changes)
        self._given = 0  # batches of the current pass
        self._begun = 0  # passes of the current epoch
        self._ended = False
        self._before: dict[str, Any] = {}  # random state when the pass was started
        self._states: dict[int, tuple[Any, Any]] = {}  # by worker: after its batch before the last, and after the last
        self._prepared: Iterator[Any] | None = None
        self._running: Iterator[Any] | None = None  # the loader's own iterator of this pass
        self._carries_over = False  # the next workers go on as those did that a checkpoint tells of
        self._left: Iterator[Any] | None = None  # what a stateful loader has left of a pass that was taken up

    def __len__(self) -> int:
        return len(self.loader)

    def start_epoch(self) -> None:
        """The next pass is the first of an epoch."""
        self._begun, self.flight = 0, None

    def close(self) -> None:
        """Let go of workers that persist."""
        if self._source is not self.loader:
            self._source._iterator = self._running = None

    def __iter__(self) -> Iterator[Any]:
        if self._prepared is not None:
            source, self._prepared = self._prepared, None
        else:
            self._finish()
            if self._left is not None:
                with isolate_rng(), generators_kept([self.loader]):
                    leave(self._left)
            self._left = None
            self._given, self._ended = 0, False
            self._begun += 1
            self._before = _random_state(self._generators)
            # Workers that persist go on with their random state; others are seeded anew.
            self._states = {w: (last, last) for w, (_, last) in self._states.items()} if self._persists else {}
            if self._draws is not None and self._carries_over:
                self._draws.started = self._before
            source = iter(self._source)
            if self._draws is not None and self._seeds is not None and self._carries_over:
                self._carries_over, self._draws.started, self._seeds.states = False, None, {}
            self._running = source
        return self._give(source)

    def _finish(self) -> None:
        """Receive what persistent workers have fetched ahead in a pass that was left early."""
        running, self._running = self._running, None
        if running is None or self._ended or not self._persists or self._draws is None or self._seeds is None:
            return
        self._draws.over = True
        while True:
            try:
                self._keep(next(running)[1])
            except StopIteration:
                break
            except Exception:
                pass  # of a batch that nobody wants
            self._given += 1
        self._draws.over = False

    def _give(self, source: Iterator[Any]) -> Iterator[Any]:
        if self.limit != _INF:
            source = islice(source, max(int(self.limit) - self._given, 0))
        if self._seeds is None:
            for batch in source:
                self._given += 1
                yield batch
        else:
            for batch, carried in source:
                self._keep(carried)
                self._given += 1
                yield batch
        self._ended = True

    def _keep(self, carried: _Carried) -> None:
        worker = self._given % self._workers
        _, last = self._states.get(worker, (None, None))
        self._states[worker] = (last, last if carried.state is None else carried.state)

    def mark(self, states: bool = True) -> Mark:
        """Where the pass is now; without ``states``, a loader is not asked for its own."""
        mark: Mark = {
            "given": self._given,
            "begun": self._begun,
            "ended": self._ended,
            "before": self._before,
            "generators": [generator.get_state() for generator in self._generators],
        }
        if self._stateful:
            mark["loader"] = self.loader.state_dict() if states else None
        if self._draws is not None:
            mark["drawing"] = self._draws.drawing
        if self._seeds is not None:
            inside = self._given % self._workers  # workers that have done their batch of this round
            mark["workers"] = {
                worker: before if worker < inside else last for worker, (before, last) in self._states.items()
            }
            if self._persists:
                mark["workers_after"] = {worker: last for worker, (_, last) in self._states.items()}
        return mark

    def carry_over(self, mark: Mark) -> None:
        """Take from ``mark`` what outlives a pass: the user's own generators, and workers that persist."""
        if "given" not in mark:
            return  # of several loaders: none of their states belongs to this one
        for generator, state in zip(self._generators, mark["generators"], strict=False):
            generator.set_state(state)
        if self._stateful and "loader" in mark:
            self._carry_state_over(mark)
        if self._seeds is None or self._draws is None or not self._persists:
            return
        if 0 < mark["given"] < _length(self._source) and not mark["ended"]:
            # It was left early, and its workers had fetched ahead: these must fetch the same.
            with isolate_rng():
                self.resume(mark)
            self._prepared = None
            self._finish()
            self._given = self._begun = 0
            for generator, state in zip(self._generators, mark["generators"], strict=False):
                generator.set_state(state)
        elif states := mark.get("workers_after"):
            self._states = {worker: (state, state) for worker, state in states.items()}
            self._seeds.states, self._carries_over = states, True

    def _carry_state_over(self, mark: Mark) -> None:
        given, ended, name = mark["given"], mark["ended"], type(self.loader).__name__
        whole = given >= _length(self.loader) or (ended and given < self.limit)
        with isolate_rng(), generators_kept([self.loader]), restoring(f"the training loader ({name})"):
            self._left = between_passes(self.loader, mark["loader"], given > 0 or ended, whole)

    def resume(self, mark: Mark) -> None:
        """Bring the next iteration to where ``mark`` was taken. Random generators are left anyhow: set them after.

        Raises:
            CheckpointError: the loader gives fewer batches than were taken of it, or cannot take a state back.
        """
        if not self._is_own(mark):
            raise CheckpointError(
                f"The checkpoint was saved with another kind of training loader, and a {type(self.loader).__name__} "
                "cannot go on where that one was. Resume with the loader it was saved with."
            )
        self._given, self._begun, self._ended = mark["given"], mark["begun"], mark["ended"]
        self._before = mark["before"]
        if self._ended:
            self._prepared = iter(())
            self.carry_over(mark)
            return
        if not self._before:
            raise CheckpointError("The checkpoint lacks the random state in which its pass began. Use another one.")
        _set_random_state(self._generators, self._before)
        if self._stateful:
            whole = self._given >= _length(self.loader)
            with restoring(f"the training loader ({type(self.loader).__name__})"):
                self._prepared = self._left = rest_of_pass(self.loader, mark["loader"], whole)
            return
        done = skipped = self._given
        if self._draws is None:
            skipped = 0
        elif self._workers:
            skipped = done // self._workers * self._workers
        if self._draws is not None:
            self._draws.skip(skipped, mark["drawing"])
            if self._persists and not skipped and mark["drawing"]:
                self._draws.started = mark["drawing"]
        if self._seeds is not None:
            states = mark.get("workers", {})
            self._states = {worker: (state, state) for worker, state in states.items()}
            self._seeds.states = states
        self._prepared = self._running = iter(self._source)
        if self._draws is not None:
            self._draws.skip(0, mark["drawing"])
            self._draws.started = None
        if self._seeds is not None:
            self._seeds.states = {}  # the workers have their copy, and later ones start as torch seeds them
        self._given = skipped
        for item in islice(self._prepared, done - skipped):
            if self._seeds is not None:
                self._keep(item[1])
            self._given += 1
        if self._given < done:
            raise CheckpointError(
                f"The checkpoint was saved after {done} batches of an epoch, and the loader "
                f"{type(self.loader).__name__} gave only {self._given}. Resume with the data it was saved with."
            )

    def _is_own(self, mark: Mark) -> bool:
        """Whether ``mark`` is of a loader of the same kind."""
        draws = self._draws is None or "drawing" in mark
        alike = self._stateful == ("loader" in mark) and len(mark.get("generators", ())) == len(self._generators)
        return "given" in mark and draws and alike

    @property
    def can_repeat(self) -> bool:
        """Whether :meth:`last_batch` works: a loader that keeps its own state does not go back by one batch."""
        return not self._stateful

    def last_batch(self, mark: Mark) -> Any:
        """The batch that was given last when ``mark`` was taken, fetched again; no random generator moves.

        A worker may have drawn other random numbers for it.
        """
        with isolate_rng():
            self.resume({**mark, "given": mark["given"] - 1, "ended": False})
            batch = next(iter(self))
        self.close()
        return batch


class CombinedPasses:
    """The same for a CombinedLoader: every loader in it is taken up where it was. Gives the batches alone."""

    def __init__(self, loader: CombinedLoader) -> None:
        self.loader = loader
        self.flight: Mark | None = None
        self._parts = [Passes(part) for part in loader.flattened]
        self._combined = copy.copy(loader)
        self._combined.flattened = self._parts
        self._combined.limits = None
        self._over = False  # the next pass is the end of one that was taken up
        self.fetches_here = True  # to start a shorter loader again draws numbers, whoever fetches its batches
        self._limit_parts()

    can_repeat = False  # its loaders may have begun again since the batch that was given last

    def last_batch(self, mark: Mark) -> Any:
        raise NotImplementedError  # see can_repeat

    def __len__(self) -> int:
        return len(self.loader)

    def start_epoch(self) -> None:
        """The next pass is the first of an epoch."""
        self.flight = None
        self._limit_parts()
        for part in self._parts:
            part.start_epoch()

    def _limit_parts(self) -> None:
        """Each part keeps its own limit: it knows how much of it a pass that was taken up has had."""
        limits = self.loader.limits or [_INF] * len(self._parts)
        for part, limit in zip(self._parts, limits, strict=True):
            part.limit = limit

    def close(self) -> None:
        """Let go of workers that persist."""
        for part in self._parts:
            part.close()

    def __iter__(self) -> Iterator[Any]:
        over, self._over = self._over, False
        return iter(()) if over else (batch for batch, _, _ in self._combined)

    def mark(self, states: bool = True) -> Mark:
        """Where every loader is now."""
        return {"parts": [part.mark(states) for part in self._parts]}

    def carry_over(self, mark: Mark) -> None:
        """Take from ``mark`` what outlives a pass."""
        for part, its_mark in zip(self._parts, mark.get("parts", ()), strict=False):
            part.carry_over(its_mark)

    def resume(self, mark: Mark) -> None:
        """Bring the next iteration to where ``mark`` was taken."""
        parts = mark.get("parts", ())
        if len(parts) != len(self._parts):
            raise CheckpointError(
                f"The checkpoint was saved with {len(parts) or 1} training loaders, and there are {len(self._parts)}. "
                "Resume with the loaders it was saved with."
            )
        if self.loader.mode == "min_size" and any(its_mark["ended"] for its_mark in parts):
            self.carry_over(mark)  # to ask for the end again would take a further batch of a longer loader
            self._over = True
            return
        for part, its_mark in zip(self._parts, parts, strict=True):
            part.resume(its_mark)
        self._combined.take_up([its_mark["begun"] > 1 for its_mark in parts])


def passes_over(loader: Any) -> Passes | CombinedPasses:
    """The passes over a training loader."""
    return CombinedPasses(loader) if isinstance(loader, CombinedLoader) else Passes(loader)


def is_replayed(loader: Any) -> bool:
    """Whether a pass over ``loader`` can only be taken up by iterating what is done again."""
    if isinstance(loader, CombinedLoader):
        return any(map(is_replayed, loader.flattened))
    return not (is_stateful(loader) or _draws_samples(loader))


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return _INF


def _num_workers(loader: Any) -> int:
    workers = getattr(loader, "num_workers", 0)
    return workers if isinstance(workers, int) else 0


def _draws_samples(loader: Any) -> bool:
    """Whether it is a DataLoader that fetches what its sampler draws, in torch's own way."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
    )


def _random_state(generators: list[torch.Generator]) -> dict[str, Any]:
    return {**rng_state(), "generators": [generator.get_state() for generator in generators]}


def _set_random_state(generators: list[torch.Generator], state: dict[str, Any]) -> None:
    for generator, its_state in zip(generators, state["generators"], strict=True):
        generator.set_state(its_state)
    set_rng_state(state)


class _Draws(SamplerProxy):
    """A sampler that can leave out its first draws; in all else it is the one in it.

    Attributes:
        drawing: the random state when the pass's first draw was asked for. It is not the state when the pass was
            started: a DataLoader draws its workers' seed in between, but not where they persist.
        started: the state when the pass was started, where the workers' seed is drawn that was not drawn before: that
            draw is taken back.
        over: no further draw is wanted of the iterations under way.
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        super().__init__(sampler)
        self._generators = generators
        self.drawing: dict[str, Any] = {}
        self._skip = 0
        self.started: dict[str, Any] | None = None
        self.over = False

    def skip(self, count: int, drawing: dict[str, Any]) -> None:
        """Let iterations begin behind ``count`` draws, the first of them made in the state ``drawing``."""
        self._skip, self.drawing = count, drawing

    def __iter__(self) -> Iterator[Any]:  # a DataLoader with workers asks twice, and takes the second answer
        draws = iter(self._sampler)  # started now, as the loader starts it: it may draw random numbers
        if not self._skip:
            return self._first(draws)
        started = _random_state(self._generators)
        _set_random_state(self._generators, self.drawing)
        for _ in islice(draws, self._skip):
            pass
        behind = [generator.get_state() for generator in self._generators]
        _set_random_state(self._generators, started)
        return self._rest(draws, behind)

    def _rest(self, draws: Iterator[Any], behind: list[Any]) -> Iterator[Any]:
        for generator, state in zip(self._generators, behind, strict=True):
            generator.set_state(state)
        yield from self._until_over(draws)

    def _first(self, draws: Iterator[Any]) -> Iterator[Any]:
        if self.started is not None:
            _set_random_state(self._generators, self.started)
        self.drawing = _random_state(self._generators)
        yield from self._until_over(draws)

    def _until_over(self, draws: Iterator[Any]) -> Iterator[Any]:
        while not self.over:
            try:
                draw = next(draws)
            except StopIteration:
                return
            yield draw


class _Carried:
    """A worker's random state behind one of its batches; ``None`` where it is as it was before."""

    __slots__ = ("state",)  # no tuple: memory pinning would walk through its hundreds of numbers

    def __init__(self, state: Any) -> None:
        self.state = state


class _Carrying:
    """A ``collate_fn`` whose batches bring along the random state of the worker that made them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: Any = None

    def __call__(self, samples: Any) -> tuple[Any, _Carried]:
        batch = self._collate(samples)
        state = worker_state()
        carried = _Carried(None if state == self._last else state)
        self._last = state
        return batch, carried


class _Seeds:
    """A ``worker_init_fn`` that, after the user's own, gives a worker the random state it had."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user
        self.states: Mapping[int, Any] = {}

    def __call__(self, worker_id: int) -> None:
        if self._user is not None:
            self._user(worker_id)
        if (state := self.states.get(worker_id)) is not None:
            set_worker_state(state)
