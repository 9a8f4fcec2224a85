"""Lets each rank report success or failure after each phase of a run's set-up, so that no rank waits for a failed
rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from drivetrain.errors import PeerError, SIGTERMException
from drivetrain.loops.progress import Progress
from drivetrain.strategies import failing, waiting
from drivetrain.strategies.group import Group
from drivetrain.trainer.shown import summary

PREPARE_DATA = "prepare_data"

# the first and the longest pause between two checks of the store, in seconds
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.25
_PATIENCE_S = 5.0  # after this time, the ranks stop polling, and wait in a collective
_ALL = "all ranks have come through"

Vote = Callable[[str], AbstractContextManager[None]]


def votes_of(trainer: Any) -> Vote:
    """Return a function that creates the context for one phase of the set-up. At the context's end, the ranks wait for
    each other.

    They poll the job's store (torch's key-value store), so that the process group stays usable after a failure. The
    phase ``PREPARE_DATA`` has no time limit, because one rank can download data for the other ranks. With one process,
    or without a store, the context does nothing.

    The context raises a PeerError if another rank has failed in the phase. The message contains the failed rank, the
    line of code and the exception.
    """
    world = trainer.strategy.world
    if world.size == 1 or (store := world.store) is None:
        return lambda phase: nullcontext()
    key = f"drivetrain/vote/{waiting.number_run()}"
    return lambda phase: _voting(store, world, key, phase, trainer.progress)


@contextmanager
def _voting(store: Any, world: Group, key: str, phase: str, progress: Progress) -> Iterator[None]:
    count, result = f"{key}/{phase}/count", f"{key}/{phase}/result"
    try:
        yield
    except BaseException as error:
        # A rank that was asked to end has not failed. The launching process also asks the other ranks to end.
        if not isinstance(error, (PeerError, SIGTERMException, KeyboardInterrupt)):
            text = summary(error, progress, phase)
            # the store keeps the first text that a rank sets
            failing.use_store(lambda: store.compare_set(result, "", text))
        raise
    if store.add(count, 1) == world.size:
        store.compare_set(result, "", _ALL)
    ends = math.inf if phase == PREPARE_DATA else time.monotonic() + _PATIENCE_S
    pause = _FIRST_PAUSE_S
    while not store.check([result]) and time.monotonic() < ends:  # a poll lets Ctrl-C end the wait
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)
    if store.check([result]) and (found := store.get(result).decode()) != _ALL:
        raise PeerError(f"Rank {world.rank} waited for the other ranks to come through {phase}. {found}")
    if phase != PREPARE_DATA:
        world.barrier(phase)
