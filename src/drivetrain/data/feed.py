"""Yield a loader's batches on the device. Each batch has a flag, which is true for the last batch."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from math import ceil
from multiprocessing import util
from multiprocessing.process import current_process
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain import parity
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info, rank_zero_warn
from drivetrain.base.seed import rng_state, worker_seed_init
from drivetrain.base.tree import was_there
from drivetrain.data.combined import CombinedLoader, start_batches
from drivetrain.data.indices import RecordedIndices
from drivetrain.data.kept import parts_of, samplers_of
from drivetrain.data.loader_passes import Passes, sized_length
from drivetrain.data.stateful import is_stateful
from drivetrain.errors import ConfigurationError

_LONGEST_SOCKET = 103  # characters in a socket's path that every system supports; Linux allows 107
_SHORT = "/tmp"


def count_batches(loader: Any, limit: int | float, argument: str) -> float:
    """Return the number of batches in one pass over ``loader``, at most ``limit``. If the number is unknown, return
    ``inf``.

    Args:
        loader: the loader to iterate.
        limit: an int is a number of batches. A float is a fraction of the length, so 1 and 1.0 differ. 0 means no
            batches.
        argument: the name of the Trainer's argument for the limit, for messages.

    Raises:
        ConfigurationError: the fraction is less than one batch, or there is a fraction, and the loader has no length.
    """
    return count_of(sized_length(loader), limit, argument, type(loader).__name__)


def count_of(length: int | None, limit: int | float, argument: str, name: str) -> float:
    """Return the result of :func:`count_batches` for a loader of class ``name`` with this ``length`` (``None``: no
    length).
    """
    if limit == 0:
        return 0
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if length is None:
        if limit == 1.0:
            return float("inf")
        raise ConfigurationError(
            f"{argument}={limit} is a fraction, but the loader {name} has no length. "
            f"Write a number of batches, {argument}=100, or {argument}=1.0 for all. [DT1023]"
        )
    count = int(length * limit)
    if count == 0 and length > 0:
        raise ConfigurationError(
            f"{argument}={limit} of {length} batches is less than one batch. "
            f"Write at least {argument}={_at_least_one_of(length)}, or a number of batches such as {argument}=1."
        )
    return count


def _at_least_one_of(length: int) -> float:
    """Return 1 / length, rounded up to four digits. A fraction that is rounded down would be less than one batch."""
    scale = 10 ** (3 + len(str(length)))
    return float(ceil(scale / length) / scale)


def fetches_ahead(loader: Any, num_batches: float = float("inf")) -> bool:
    """Return whether the next batch is fetched before the current one is processed.

    Batches are fetched ahead if there are workers. Without workers, batches are fetched ahead if the loader has no
    length, or has an iterable-style dataset, whose length may be wrong. Only a further fetch then shows which batch is
    the last. In all other cases, no batch is fetched ahead, so that random numbers are drawn in the same order as in a
    plain loop. With ``early_iterators`` of :mod:`drivetrain.parity` and no workers, batches are fetched ahead exactly
    if ``num_batches`` is ``inf``.
    """
    if any(getattr(part, "num_workers", 0) > 0 for part in parts_of(loader)):
        return True
    if parity.current().early_iterators:
        return num_batches == float("inf")
    if sized_length(loader) is None:
        return True
    # The length of a loader over an iterable-style dataset may be wrong.
    return any(isinstance(getattr(part, "dataset", None), IterableDataset) for part in parts_of(loader))


def feed(
    batches: Iterable[Any],
    num_batches: float,
    move: Callable[[Any], Any] | None,
    ahead: bool,
    resumed: Resumed | None = None,
    started: Iterator[Any] | None = None,
    pins: bool = False,
) -> Iterator[tuple[Any, bool]]:
    """Yield ``(batch, is_last)``.

    Unless a limit ends the pass early, the pass exhausts the loader, as a ``for`` loop does. The loader's code after
    its last batch then runs, and samplers draw their last random numbers. The loader is exhausted only if the caller
    requests another item after the last batch.

    Args:
        batches: a loader, or a :class:`Passes` object. This function creates one iterator of ``batches``.
        num_batches: the maximum number of batches, or ``inf``.
        move: moves a batch to the device as soon as the batch is fetched, or ``None`` if an overridden transfer hook
            moves the batch later. If the first batch is already on the device, ``move`` is not called for the other
            batches of this pass.
        ahead: the result of :func:`fetches_ahead`.
        resumed: the position of a resumed pass, or ``None`` for a new pass.
        started: the iterator over ``batches``, if it was already created.
        pins: the argument ``pins`` of :func:`drivetrain.data.batched.start_pass`.
    """
    done = 0 if resumed is None else resumed.done
    items = start_batches(batches, pins) if started is None else started
    is_endless = num_batches == float("inf")
    left = 0 if is_endless else max(int(num_batches) - done, 0)
    source = islice(items, None if is_endless else left)
    if ahead:
        yield from _ahead(batches, source, move, resumed)
        _ask_for_end(batches, items, num_batches)
        return
    flags = repeat(False) if is_endless else chain(repeat(False, left - 1), repeat(True, min(left, 1)))
    if move is not None:
        for batch in source:
            moved = move(batch)
            if was_there(batch, moved):
                move = None  # this loader's batches are already on the device
            yield moved, next(flags)
            if move is None:
                break
        batch = moved = None  # free the first batch before the next is processed
    yield from zip(source, flags, strict=False)  # this needs no Python function call per batch
    if not is_endless and (missing := sum(1 for _ in flags)) > 0:
        loader = _behind(batches)
        promise, cure = "was limited to", "Limit it to the batches that it has."
        if sized_length(loader) is not None:
            promise, cure = "has a length that promised", "Correct its __len__."
        if _is_its_own_iterator(loader):
            cure = "Pass the loader itself instead of its iterator, or correct its __len__."
        rank_zero_warn(
            f"The loader {type(loader).__name__} {promise} {num_batches:.0f} batches, and "
            f"gave {num_batches - missing:.0f}. What belongs to the last batch of an epoch was left out. "
            f"{cure} [DT1024]"
        )
        return
    _ask_for_end(batches, items, num_batches)


def _behind(batches: Any) -> Any:
    """Return the user's loader of a pass over ``batches``."""
    return batches.loader if isinstance(batches, (Passes, RecordedIndices)) else batches


def _ask_for_end(batches: Any, items: Iterator[Any], num_batches: float) -> None:
    """Exhaust ``items`` after the last batch, unless a limit has ended the pass early.

    A loader that is its own iterator is not exhausted, because another ``next`` would take the first batch of the
    loader's next pass. With ``early_iterators`` of :mod:`drivetrain.parity`, a DataLoader without workers is not
    exhausted, either.
    """
    loader = _behind(batches)
    as_then = parity.current().early_iterators and isinstance(loader, DataLoader) and loader.num_workers == 0
    if as_then or sized_length(batches) != num_batches or _is_its_own_iterator(loader):
        return
    end = object()
    try:
        has_more = next(items, end) is not end
    except Exception as error:
        rank_zero_warn(
            f"The loader {type(loader).__name__} yielded the {num_batches:.0f} batches of its length, and raised "
            f"{type(error).__name__}: {error} when it was asked for its end. The run continues. Let its iterator end "
            "without an error."
        )
        return
    if has_more:
        rank_zero_warn(
            f"The loader {type(loader).__name__} has a length of {num_batches:.0f} batches and yields more. The others "
            "are not used. Correct its __len__."
        )


def gives_up(loader: Any, num_batches: float) -> bool:
    """Whether a pass of ``num_batches`` batches ends before the loader does, and the next pass begins with the loader's
    first batch.

    The result is false for a loader that is its own iterator, because its next pass continues after the previous pass.
    """
    return num_batches < sized_length(loader, float("inf")) and not _is_its_own_iterator(loader)


def position_after_end(passes: Passes, before: dict[str, Any]) -> dict[str, Any]:
    """Return the position of ``passes`` after the end of a pass. ``before`` is the position at which the pass was
    resumed.

    If a stateful loader has yielded no batch since the resume, the loader may have no state yet. The result then
    contains the loader's state from ``before``.
    """
    ended = [part["ended"] for part in before.get("parts", [before])]
    if any(ended) if getattr(passes.loader, "mode", None) == "min_size" else all(ended):
        return before  # the saved pass had already ended
    position = passes.position(states=False)
    parts = zip(position.get("parts", [position]), before.get("parts", [before]), parts_of(passes.loader), strict=True)
    for part, old, loader in parts:
        if "loader" in part:
            part["loader"] = old["loader"] if part["given"] == old["given"] else loader.state_dict()
    return position


def _is_its_own_iterator(loader: Any) -> bool:
    """Whether ``iter(loader)`` continues the last pass, and does not start a new pass. For a CombinedLoader: whether
    this is true of any of its loaders.
    """
    parts = parts_of(loader)
    # the datasets of stateful loaders do not count, because a stateful loader always starts a new pass
    datasets = (getattr(part, "dataset", None) for part in parts if not is_stateful(part))
    return any(hasattr(each, "__next__") for each in (*parts, *datasets))


@dataclass(frozen=True)
class Resumed:
    """The position at which a pass resumes.

    Attributes:
        done: the number of finished batches of the pass.
        caught_up: a function that is called when the resumed pass has fetched as many batches as the interrupted pass.
    """

    done: int
    caught_up: Callable[[], None]


def _ahead(
    batches: Any, source: Iterator[Any], move: Callable[[Any], Any] | None, resumed: Resumed | None
) -> Iterator[tuple[Any, bool]]:
    """Yield ``(batch, is_last)``, and fetch one batch ahead. If ``batches`` is a Passes object, record the position
    before each fetch.
    """
    passes = batches if isinstance(batches, Passes) else None
    current: Any = None
    fetched = 0
    while True:
        if passes is not None:
            position = passes.position()
            if passes.fetches_here:
                position["rng"] = rng_state()
            passes.flight = position  # a checkpoint contains the position before the batch that is fetched ahead
        for batch in source:
            following = batch if move is None else move(batch)
            break
        else:
            break
        fetched += 1
        if fetched == 1 and resumed is not None:
            resumed.caught_up()
        if fetched > 1:
            yield current, False
        current = following
    if passes is not None:
        passes.flight = None
    if fetched:
        yield current, True


@dataclass(eq=False, repr=False)
class BatchIterator:
    """The argument ``dataloader_iter`` of a step that fetches its batches itself.

    ``next`` returns ``(batch, batch_idx, dataloader_idx)``. In each step, the first call returns the batch that the
    loop has fetched. Later calls return further batches of the pass. The loop continues after the last batch that the
    step has fetched.

    Args:
        source: the rest of the pass, as yielded by :func:`feed`.
        advance: a function that is called with ``is_last`` for each further batch, and returns the batch's index.
        transfer: an overridden hook that moves a batch to the device, or ``None``.
        dataloader_idx: the loader's index in an evaluation over several loaders.

    Attributes:
        taken: the number of batches that the current or last step has taken.
    """

    source: Iterator[tuple[Any, bool]]
    advance: Callable[[bool], int]
    transfer: Callable[[Any, int], Any] | None
    dataloader_idx: int = 0
    taken: int = field(default=0, init=False)
    _held: tuple[Any, int, int] | None = field(default=None, init=False)

    def hold(self, batch: Any, batch_idx: int) -> BatchIterator:
        """Store the batch that the loop has fetched, so that ``next`` returns it first. Return this object."""
        self._held, self.taken = (batch, batch_idx, self.dataloader_idx), 1
        return self

    def bound(self, step: Callable[..., Any]) -> Callable[[Any, int], Any]:
        """Return a function of a batch and its index that calls ``step`` with this iterator. If ``step`` requests a
        batch after the last batch, the function returns ``None``.
        """

        def call(batch: Any, batch_idx: int) -> Any:
            try:
                return step(self.hold(batch, batch_idx))
            except StopIteration:
                return None

        return call

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._held is not None:
            held, self._held = self._held, None
            return held
        batch, is_last = next(self.source)
        if self.transfer is not None:
            batch = self.transfer(batch, self.dataloader_idx)
        self.taken += 1
        return batch, self.advance(is_last), self.dataloader_idx


def seed_workers(loader: Any, rank: int | None = None) -> None:
    """If ``seed_everything(workers=True)`` was called, make the loader's workers seed Python's and NumPy's generators.
    Loaders with a ``worker_init_fn`` do not change.

    Args:
        loader: a loader. Only a DataLoader is changed.
        rank: the index of this process's part of the data. Ranks that share one model have equal indices, because such
            ranks must augment samples identically.
    """
    wanted = os.environ.get("PL_SEED_WORKERS") == "1"
    if wanted and getattr(loader, "num_workers", 0) > 0 and getattr(loader, "worker_init_fn", True) is None:
        of_rank = rank is None or rank == rank_from_environ()
        loader.worker_init_fn = worker_seed_init if of_rank else functools.partial(worker_seed_init, rank=rank)


def make_room_for_sockets(loader: Any) -> None:
    """If the path of the temporary folder is too long for sockets, choose another folder for the sockets of the
    loader's workers.

    Workers send tensors through sockets that ``multiprocessing`` creates in the temporary folder. If that folder's path
    is too long, the loader waits forever for its first batch. This function does nothing in versions of Python that
    handle long paths themselves.
    """
    config = getattr(current_process(), "_config", None)
    if not getattr(loader, "num_workers", 0) or not isinstance(config, dict) or config.get("tempdir"):
        return
    path = os.path.join(tempfile.gettempdir(), "pymp-12345678", "listener-12345678")
    if os.name != "posix" or hasattr(util, "_get_base_temp_dir") or len(path) <= _LONGEST_SOCKET:
        return
    if not os.access(_SHORT, os.W_OK | os.X_OK):
        return
    config["tempdir"] = folder = tempfile.mkdtemp(prefix="pymp-", dir=_SHORT)
    util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-100)
    rank_zero_info(
        f"The path of the temporary folder {tempfile.gettempdir()} is too long for sockets, through which loaders get "
        f"batches from their workers. The sockets are in {folder}."
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on the loader's samplers and its iterable-style dataset, if they have this method. The
    samplers include the batch sampler and the batch sampler's own sampler.
    """
    if isinstance(loader, CombinedLoader):
        for part in loader.flattened:
            set_epoch(part, epoch)
        return
    dataset = getattr(loader, "dataset", None)
    for part in (*samplers_of(loader), *([dataset] if isinstance(dataset, IterableDataset) else ())):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
