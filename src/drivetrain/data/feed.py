"""Yield a loader's batches on the device, each with whether it is the last one."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from multiprocessing import util
from multiprocessing.process import current_process
from typing import Any

from torch.utils.data import IterableDataset

from drivetrain import parity
from drivetrain.base.rank_zero import rank_from_environ, rank_zero_info, rank_zero_warn
from drivetrain.base.seed import rng_state, worker_seed_init
from drivetrain.base.tree import was_there
from drivetrain.data.batched import start_pass
from drivetrain.data.combined import CombinedLoader, without_restart
from drivetrain.data.indices import RecordedIndices
from drivetrain.data.kept import parts_of, samplers_of
from drivetrain.data.loader_passes import Passes
from drivetrain.data.passes import CombinedPasses
from drivetrain.errors import ConfigurationError

_LONGEST_SOCKET = 103  # characters of a socket's path on every system; Linux allows 107
_SHORT = "/tmp"


def sized_length(loader: Any) -> int | None:
    """Return ``len(loader)``, or ``None`` where it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def count_batches(loader: Any, limit: int | float, argument: str) -> float:
    """Return the number of batches of one pass over ``loader``: its length, limited; ``inf`` if it is unknown.

    Args:
        loader: what is iterated.
        limit: an int counts batches, a float is a fraction of the length; 1 and 1.0 differ. 0 means none.
        argument: the Trainer's argument that holds the limit, for messages.

    Raises:
        ConfigurationError: the fraction leaves no batch, or there is no length to take a fraction of.
    """
    return count_of(sized_length(loader), limit, argument, type(loader).__name__)


def count_of(length: int | None, limit: int | float, argument: str, name: str) -> float:
    """:func:`count_batches` of a loader of this ``length`` (``None``: it has none) and class ``name``."""
    if limit == 0:
        return 0
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if length is None:
        if limit == 1.0:
            return float("inf")
        raise ConfigurationError(
            f"{argument}={limit} is a fraction, but the loader {name} has no length. "
            f"Write a number of batches, {argument}=100, or {argument}=1.0 for all."
        )
    count = int(length * limit)
    if count == 0 and length > 0:
        raise ConfigurationError(
            f"{argument}={limit} of {length} batches is less than one batch. "
            f"Write at least {argument}={_at_least_one_of(length)}, or a number of batches such as {argument}=1."
        )
    return count


def _at_least_one_of(length: int) -> float:
    """Return the fraction 1 / length, to four digits, rounded up: rounded down it would leave nothing again."""
    scale = 10 ** (3 + len(str(length)))
    return float(ceil(scale / length) / scale)


def fetches_ahead(loader: Any, num_batches: float = float("inf")) -> bool:
    """Return whether the next batch is fetched before the current one is worked on.

    Only with workers, or where nothing else tells which batch is the last. With ``num_workers=0`` and a known length
    never: it would shift the draws from the global random generators against those of a plain loop. The switch
    ``early_iterators`` counts a pass as known that a limit of ``num_batches`` ends.
    """
    if any(getattr(part, "num_workers", 0) > 0 for part in parts_of(loader)):
        return True
    if parity.current().early_iterators:
        return num_batches == float("inf")
    if sized_length(loader) is None:
        return True
    # The length of an iterable-style dataset may be a mere promise.
    return any(isinstance(getattr(part, "dataset", None), IterableDataset) for part in parts_of(loader))


def feed(
    batches: Iterable[Any],
    num_batches: float,
    move: Callable[[Any], Any] | None,
    ahead: bool,
    resumed: Resumed | None = None,
    started: Iterator[Any] | None = None,
) -> Iterator[tuple[Any, bool]]:
    """Yield ``(batch, is_last)``.

    A pass that is not cut short by a limit asks the loader for its end, as a ``for`` loop does: code behind the last
    batch runs, and samplers draw what they draw there. It asks when the next batch is wanted after the last one.

    Args:
        batches: a loader, or the passes over one; its iterator is made here, once.
        num_batches: where to stop, ``inf`` for its end.
        move: moves a batch to the device as soon as it is fetched; ``None`` if an overridden transfer hook does it
            later. If the first batch is on the device already, the loader's other batches do
            too, and it is not called again in this pass.
        ahead: see :func:`fetches_ahead`.
        resumed: the pass resumes in its middle; its iterator is already there.
        started: the iterator over ``batches``, where one was made before.
    """
    done = 0 if resumed is None else resumed.done
    items = without_restart(start_pass(batches)) if started is None else started
    if isinstance(batches, CombinedLoader) and started is None:
        items = (item[0] for item in items)
    source = islice(items, None if num_batches == float("inf") else max(int(num_batches) - done, 0))
    if ahead:
        yield from _ahead(batches, source, move, resumed)
        _ask_for_end(batches, items, num_batches)
        return
    position = done
    for position, batch in enumerate(source, done + 1):
        if move is not None:
            moved = move(batch)
            if was_there(batch, moved):
                move = None  # this loader's batches lie where they are wanted
            batch = moved
        yield batch, position == num_batches
    if position < num_batches < float("inf"):
        loader = _behind(batches)
        promise = "has a length that promised" if sized_length(loader) is not None else "was limited to"
        cure = "Correct its __len__." if sized_length(loader) is not None else "Limit it to the batches that it has."
        if any(map(_is_its_own_iterator, parts_of(loader))):
            cure = "Pass the loader itself instead of its iterator, or correct its __len__."
        rank_zero_warn(
            f"The loader {type(loader).__name__} {promise} {num_batches:.0f} batches, and "
            f"gave {position}. What belongs to the last batch of an epoch was left out. {cure}"
        )
        return
    _ask_for_end(batches, items, num_batches)


def _behind(batches: Any) -> Any:
    """Return the user's loader that ``batches`` iterates."""
    return batches.loader if isinstance(batches, (Passes, CombinedPasses, RecordedIndices)) else batches


def _ask_for_end(batches: Any, items: Iterator[Any], num_batches: float) -> None:
    """Exhaust ``items``, all of whose batches were taken, unless a limit has cut the pass short.

    An object that is its own iterator is not asked: it would lose the batch with which its next pass begins.
    """
    loader = _behind(batches)
    if sized_length(batches) != num_batches or any(map(_is_its_own_iterator, parts_of(loader))):
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
    """Whether a pass of ``num_batches`` leaves ``loader`` before its end, so that the next starts at the beginning.

    An object that is its own iterator is never left so: its next pass continues where it is.
    """
    length = sized_length(loader)
    left = num_batches < (float("inf") if length is None else length)
    return left and not any(map(_is_its_own_iterator, parts_of(loader)))


def position_after_end(passes: Passes | CombinedPasses, before: dict[str, Any]) -> dict[str, Any]:
    """Where ``passes`` are, now that a loader that was resumed at ``before`` has been asked for its end.

    A loader with a state of its own that gave no further batch keeps its state of before: it may not have one yet.
    """
    ended = [part["ended"] for part in before.get("parts", [before])]
    if any(ended) if getattr(passes.loader, "mode", None) == "min_size" else all(ended):
        return before  # it had been asked before
    position = passes.position(states=False)
    parts = zip(position.get("parts", [position]), before.get("parts", [before]), parts_of(passes.loader), strict=True)
    for part, old, loader in parts:
        if "loader" in part:
            part["loader"] = old["loader"] if part["given"] == old["given"] else loader.state_dict()
    return position


def _is_its_own_iterator(loader: Any) -> bool:
    return hasattr(loader, "__next__") or hasattr(getattr(loader, "dataset", None), "__next__")


@dataclass(frozen=True)
class Resumed:
    """How a pass resumes in its middle.

    Attributes:
        done: batches of it that are done.
        caught_up: called once everything has been fetched that had been fetched when the pass was left.
    """

    done: int
    caught_up: Callable[[], None]


def _ahead(
    batches: Any, source: Iterator[Any], move: Callable[[Any], Any] | None, resumed: Resumed | None
) -> Iterator[tuple[Any, bool]]:
    """Fetch each batch before the one ahead of it is worked on; of passes, keep where they were before that fetch."""
    passes = batches if isinstance(batches, (Passes, CombinedPasses)) else None
    current: Any = None
    fetched = 0
    while True:
        if passes is not None:
            position = passes.position()
            if passes.fetches_here:
                position["rng"] = rng_state()
            passes.flight = position  # it stays if the pass is given up: the batch in flight was not worked on
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
    """What a step gets that takes ``dataloader_iter`` instead of a batch.

    ``next`` returns ``(batch, batch_idx, dataloader_idx)``: first the batch that the loop has fetched, then further
    ones of the same pass, for a step that uses several. The loop continues after the last one that was taken.

    Args:
        source: the rest of the pass, as :func:`feed` yields it.
        advance: told that one more batch was taken and whether it is the last; returns its index.
        transfer: brings a batch to the device where an overridden hook does that.
        dataloader_idx: of an evaluation over several loaders.

    Attributes:
        taken: how many batches the running, or the last, step has taken.
    """

    source: Iterator[tuple[Any, bool]]
    advance: Callable[[bool], int]
    transfer: Callable[[Any, int], Any] | None
    dataloader_idx: int = 0
    taken: int = field(default=0, init=False)
    _held: tuple[Any, int, int] | None = field(default=None, init=False)

    def hold(self, batch: Any, batch_idx: int) -> BatchIterator:
        """Take the batch that the loop has fetched; return the iterator, which gives it first."""
        self._held, self.taken = (batch, batch_idx, self.dataloader_idx), 1
        return self

    def bound(self, step: Callable[..., Any]) -> Callable[[Any, int], Any]:
        """Return ``step`` as the loop calls it. One that asks for more batches than there are is left out."""

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
    """After ``seed_everything(workers=True)``: seed python and numpy in each worker, unless the user does it.

    Args:
        loader: a loader that is no DataLoader is left unchanged.
        rank: this process's place in the data, where it is not its rank: the ranks of one model must augment the same
            samples alike.
    """
    wanted = os.environ.get("PL_SEED_WORKERS") == "1"
    if wanted and getattr(loader, "num_workers", 0) > 0 and getattr(loader, "worker_init_fn", True) is None:
        of_rank = rank is None or rank == rank_from_environ()
        loader.worker_init_fn = worker_seed_init if of_rank else functools.partial(worker_seed_init, rank=rank)


def make_room_for_sockets(loader: Any) -> None:
    """Choose a folder for sockets of the loader's workers where that of temporary files has a path too long for them.

    Workers send tensors through sockets, which ``multiprocessing`` makes in that folder. Where it cannot, the loader
    would wait for its first batch for ever. Versions of Python that look after it themselves are left alone.
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
        f"batches from their workers. They lie in {folder}."
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader's samplers, also of one nested in a batch sampler."""
    if isinstance(loader, CombinedLoader):
        for part in loader.flattened:
            set_epoch(part, epoch)
        return
    for sampler in samplers_of(loader):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
