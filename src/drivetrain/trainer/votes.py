"""The ranks vote after each phase of a run's set-up, so that none waits for one that has failed in it."""

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

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.25  # between two questions to the store, which grow
_PATIENCE_S = 5.0  # in which a rank waits at the store; then it waits in an exchange, which ends if a rank dies
_ALL = "all ranks have come through"

Vote = Callable[[str], AbstractContextManager[None]]


def votes_of(trainer: Any) -> Vote:
    """Return what makes the context of one phase of the set-up: where it ends, the ranks wait for each other.

    They wait at the job's store, so that the process group can still be used when one of them has failed. There is no
    time limit for ``PREPARE_DATA``, in which one rank may download what the others wait for. With one process, and with
    ranks that have no store, the context does nothing.

    The context raises:
        PeerError: another rank has failed in the phase; the message says which, in which line and by what.
    """
    world = trainer.strategy.world
    if (store := world.store) is None:
        return lambda phase: nullcontext()
    key = f"drivetrain/vote/{waiting.number_run()}"
    return lambda phase: _voting(store, world, key, phase, trainer.progress)


@contextmanager
def _voting(store: Any, world: Group, key: str, phase: str, progress: Progress) -> Iterator[None]:
    count, result = f"{key}/{phase}/count", f"{key}/{phase}/result"
    try:
        yield
    except BaseException as error:
        # One that is asked to end has not failed: the launching process asks the others, who end in the same way.
        if not isinstance(error, (PeerError, SIGTERMException, KeyboardInterrupt)):
            text = summary(error, progress, phase)
            failing.use_store(lambda: store.compare_set(result, "", text))  # nothing if another rank has ended the vote
        raise
    if store.add(count, 1) == world.size:
        store.compare_set(result, "", _ALL)
    ends = math.inf if phase == PREPARE_DATA else time.monotonic() + _PATIENCE_S
    pause = _FIRST_PAUSE_S
    while not store.check([result]) and time.monotonic() < ends:  # asked again and again, so that Ctrl-C is heard
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)
    if store.check([result]) and (found := store.get(result).decode()) != _ALL:
        raise PeerError(f"Rank {world.rank} waited for the other ranks to come through {phase}. {found}")
    if phase != PREPARE_DATA:
        world.barrier(phase)
