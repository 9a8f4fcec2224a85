"""Iterate a torch DataLoader with a sampler, pass by pass, so that a run can resume exactly in the middle of a pass.

[Note: workers]
With each batch, a worker sends the state of its random generators if the state has changed. Torch distributes batches
to workers in turn. A pass with W workers is therefore resumed at the start of a round of W batches. Each worker begins
with its state at that point. The finished batches of the round are fetched again and discarded.

Persistent workers continue with their generators in the next pass. If a pass is abandoned, its persistent workers have
fetched ahead, and their generators have advanced. The main process then receives and discards these batches, to learn
the workers' states. A run may resume between an abandoned pass and the next pass. Its new workers then fetch the same
batches ahead, so that their generators reach the same states.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from math import inf
from typing import Any

import torch

from drivetrain.base import torch_private
from drivetrain.base.packages import sharedctypes
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.seed import isolate_rng
from drivetrain.data import sample_seeds
from drivetrain.data.batched import batched, iterate, slices
from drivetrain.data.kept import generator_states, set_generator_states, set_worker_state, worker_state
from drivetrain.data.loader_passes import Passes, Position, random_state, set_random_state, sized_length
from drivetrain.data.resample import SamplerProxy, drawn_by, replaced


class SampledPasses(Passes):
    """Passes over a DataLoader with a map-style dataset. A resumed pass does not fetch finished batches.

    The user's loader does not change. This class iterates a copy that shares the dataset, the samplers and the
    generator.

    Args:
        loader: the DataLoader.
        pins: the argument ``pins`` of :func:`drivetrain.data.batched.start_pass`.
        seeds: the values on which the samples' random numbers depend. With ``None``, the numbers depend on the process
            that fetches the sample.
    """

    def __init__(self, loader: Any, pins: bool = False, seeds: sample_seeds.SampleSeeds | None = None) -> None:
        super().__init__(loader)
        self._persists = bool(loader.persistent_workers)
        self._sample_seeds = seeds
        source = loader
        if seeds is not None:
            source = sample_seeds.seeded(loader, seeds)
        source = batched(source, pins)
        place = drawn_by(loader)
        self._draws = _Draws(getattr(source, place), self._generators)
        changes: dict[str, Any] = {place: self._draws}
        self._seeds: _Seeds | None = None
        if self._workers:
            self._seeds = _Seeds(source.worker_init_fn)
            changes |= {"collate_fn": _Carrying(source.collate_fn), "worker_init_fn": self._seeds}
        self._source = replaced(source, **changes)
        # for each worker, its random states after its last two batches
        self._states: dict[int, tuple[Any, Any]] = {}
        self._running: Iterator[Any] | None = None  # the iterator of this pass
        self._begun_at = 0.0  # when the iterator was created
        self._carries_over = False  # whether the workers of the next pass start with the random states of a checkpoint

    def close(self) -> None:
        for iterator in (self._running, torch_private.kept_iterator(self._source)):
            if isinstance(iterator, torch_private.PassOfWorkers):
                torch_private.end_workers(iterator)
        self._running = None
        torch_private.keep_iterator(self._source, None)

    def _leave(self) -> None:
        """If the pass was abandoned, receive and discard the batches that persistent workers have fetched ahead."""
        running, self._running = self._running, None
        if running is None or self._ended or not self._persists or self._seeds is None:
            return
        self._draws.over = True
        while True:
            try:
                self._keep(next(running)[1])
            except StopIteration:
                break
            except Exception:
                pass  # the batch is not used, so its error does not matter
            self._given += 1
        self._draws.over = False

    def _start(self) -> Iterator[Any]:
        # Persistent workers keep their random states. New workers are seeded again.
        self._states = {w: (last, last) for w, (_, last) in self._states.items()} if self._persists else {}
        if self._sample_seeds is not None:
            self._sample_seeds.passes = self._begun
            if self._persists and torch_private.kept_iterator(self._source) is not None:
                # torch draws a seed when it starts new workers. If workers are kept, this line draws the number
                # instead.
                torch.empty((), dtype=torch.int64).random_(generator=self._source.generator)
        if self._carries_over:
            self._draws.started = self._before
        self._begun_at = time.perf_counter()
        self._running = iterate(self._source)
        if self._seeds is not None and self._carries_over:
            self._carries_over, self._draws.started, self._seeds.states = False, None, {}
        return self._running

    def _count(self, source: Iterator[Any]) -> Iterator[Any]:
        return super()._count(source) if self._seeds is None else self._count_carried(source)

    def _count_carried(self, source: Iterator[Any]) -> Iterator[Any]:
        for batch, carried in source:
            if not self._given:
                self.seconds_to_first = time.perf_counter() - self._begun_at
            self._keep(carried)
            self._given += 1
            yield batch
        self._ended = True

    def _keep(self, carried: _Carried) -> None:
        worker = self._given % self._workers
        _, last = self._states.get(worker, (None, None))
        self._states[worker] = (last, last if carried.state is None else carried.state)

    def position(self, states: bool = True) -> Position:
        position = {**super().position(states), "drawing": self._draws.drawing}
        if self._sample_seeds is not None:
            position["seed"] = self._sample_seeds.seed  # each sample is seeded, so workers need no state
        elif self._seeds is not None:
            inside = self._given % self._workers  # the number of workers that are done in this round
            position["workers"] = {
                worker: before if worker < inside else last for worker, (before, last) in self._states.items()
            }
            if self._persists:
                position["workers_after"] = {worker: last for worker, (_, last) in self._states.items()}
        return position

    def _fits(self, position: Position) -> bool:
        return super()._fits(position) and "drawing" in position

    def _carry_over(self, position: Position) -> None:
        self._restore_seed(position)
        if self._seeds is None or self._sample_seeds is not None or not self._persists:
            return
        if 0 < position["given"] < sized_length(self._source, inf) and not position["ended"]:
            # The saved pass was abandoned after its workers had fetched ahead, so the new workers must fetch the same
            # batches.
            with isolate_rng():
                self.resume(position)
            self._prepared = None
            self._leave()
            self._given = self._begun = 0
            set_generator_states(self._generators, position["generators"])
        elif states := position.get("workers_after"):
            self._states = {worker: (state, state) for worker, state in states.items()}
            self._seeds.states, self._carries_over = states, True

    def resume(self, position: Position) -> None:
        super().resume(position)
        # also if the pass has ended, because another checkpoint may contain this position
        self._draws.drawing = position["drawing"]

    def _restore_seed(self, position: Position) -> None:
        if (seeds := self._sample_seeds) is not None:
            seeds.passes, own = self._begun, seeds.seed
            seeds.seed = position.get("seed", own)
            if seeds.seed != own:
                rank_zero_info(
                    f"sample_seeds=True: the samples' random numbers continue with the checkpoint's seed {seeds.seed}, "
                    f"not with {own}."
                )

    def _resume(self, position: Position) -> None:
        self._restore_seed(position)
        done = position["given"]
        skipped = done // self._workers * self._workers if self._workers else done
        self._draws.skip(skipped, position["drawing"])
        if self._persists and not skipped and position["drawing"]:
            self._draws.started = position["drawing"]
        if self._seeds is not None:
            states = position.get("workers", {})
            self._states = {worker: (state, state) for worker, state in states.items()}
            self._seeds.states = states
        self._prepared = self._running = iterate(self._source)
        self._draws.skip(0, position["drawing"])
        self._draws.started = None
        if self._seeds is not None:
            self._seeds.states = {}  # the running workers have copies of these states, and torch seeds later workers
        self._discard(self._prepared, skipped, done)

    def _discarded(self, item: Any) -> None:
        if self._seeds is not None:
            self._keep(item[1])


class _Draws(SamplerProxy):
    """Wraps a sampler, and can skip its first draws. In all else, it behaves like the wrapped sampler.

    Attributes:
        drawing: the random state before the sampler's first draw. A DataLoader may have drawn a seed for its workers
            since the start of the pass.
        started: the random state that the sampler restores before its first draw, or ``None``. It is set if the
            DataLoader draws a seed that the interrupted run did not draw.
        over: whether running iterations must end.
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        super().__init__(sampler)
        self._generators = generators
        self.drawing: dict[str, Any] = {}
        self._skip = 0
        self.started: dict[str, Any] | None = None
        self.over = False

    def skip(self, count: int, drawing: dict[str, Any]) -> None:
        """Let the next iteration skip its first ``count`` draws. ``drawing``: the random state before these draws."""
        self._skip, self.drawing = count, drawing

    def __iter__(self) -> Iterator[Any]:  # DataLoaders with workers call __iter__ twice
        # the sampler's iter() may draw a random number, so it is called here and not at the first draw
        return self._started(iter(self._sampler))

    def slices(self, dataset: Any) -> Iterator[Any] | None:
        draws = slices(self._sampler, dataset)
        return None if draws is None else self._started(draws)

    def _started(self, draws: Iterator[Any]) -> Iterator[Any]:
        if not self._skip:
            return self._until_over(draws, self._begin)
        started = random_state(self._generators)
        set_random_state(self._generators, self.drawing)
        for _ in islice(draws, self._skip):
            pass
        behind = generator_states(self._generators)
        set_random_state(self._generators, started)
        return self._until_over(draws, partial(set_generator_states, self._generators, behind))

    def _begin(self) -> None:
        if self.started is not None:
            set_random_state(self._generators, self.started)
        self.drawing = random_state(self._generators)

    def _until_over(self, draws: Iterator[Any], before_the_first: Callable[[], None]) -> Iterator[Any]:
        before_the_first()
        while not self.over:
            try:
                draw = next(draws)
            except StopIteration:
                return
            yield draw


class _Carried:
    """A worker's random state after a batch, or ``None`` if the state has not changed since the worker's previous
    batch.
    """

    __slots__ = ("state",)  # not a tuple, because memory pinning would traverse it

    def __init__(self, state: Any) -> None:
        self.state = state


class _Carrying:
    """A ``collate_fn`` that returns pairs of a batch and the worker's random state."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._last: Any = None

    def __call__(self, samples: Any) -> tuple[Any, _Carried]:
        batch = self._collate(samples)
        state = worker_state()
        carried = _Carried(None if state == self._last else state)
        self._last = state
        return batch, carried


_outlives: list[Any] = []  # one byte in shared memory; workers ignore SIGTERM while it is not 0
_fits = [0]  # number of fits that run in this process


def workers_outlive_sigterm(outlive: bool) -> None:
    """Count the running fits: add one if ``outlive``, else subtract one. While a fit runs, workers ignore SIGTERM.

    A SIGTERM to the process group reaches the rank and its workers. The rank needs the workers' batches until the rank
    has saved a checkpoint. Workers always ignore Ctrl-C, because their rank ends them.
    """
    _fits[0] += 1 if outlive else -1
    for byte in _outlives:
        byte.value = _fits[0]


def _outlive_signals(outlives: Any) -> None:
    def end(number: int, frame: Any) -> None:
        if not outlives.value:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)


class _Seeds:
    """A ``worker_init_fn`` that calls the user's ``worker_init_fn``, then restores the worker's random state."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user
        self.states: Mapping[int, Any] = {}
        if not _outlives:
            _outlives.append(sharedctypes.RawValue("b", _fits[0]))
        self._outlives = _outlives[0]

    def __call__(self, worker_id: int) -> None:
        _outlive_signals(self._outlives)
        if self._user is not None:
            self._user(worker_id)
        if (state := self.states.get(worker_id)) is not None:
            set_worker_state(state)
