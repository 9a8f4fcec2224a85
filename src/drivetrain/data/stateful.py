"""Resume passes over loaders that save their position themselves, with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any

_END = object()  # what next() returns at the end of a loader, because None may be a batch


def is_stateful(loader: Any) -> bool:
    """Return whether ``loader`` can save and restore its position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def samples_of_all_ranks(position: Any) -> int | None:
    """Return how many samples of the epoch all ranks together have got, if the loader's state counts them; else
    ``None``.

    The count is the entry ``sample_in_epoch`` of the state, or of the state's entry ``dataset``. A loader with such a
    state can divide the rest of the epoch among any number of ranks.

    Args:
        position: the position of a pass.
    """
    state = position.get("loader") if isinstance(position, Mapping) else None
    for part in (state, state.get("dataset")) if isinstance(state, Mapping) else ():
        if isinstance(part, Mapping) and isinstance(count := part.get("sample_in_epoch"), int):
            return count
    return None


def rest_of_pass(loader: Any, state: Any, whole: bool) -> Iterator[Any]:
    """Load ``state`` and return the remaining batches of its pass.

    Args:
        loader: a stateful loader.
        state: a result of its ``state_dict``.
        whole: whether all batches of the pass were yielded; the loader may or may not have been exhausted afterwards.
    """
    loader.load_state_dict(copy.deepcopy(state))
    rest: Iterator[Any] = iter(loader)
    if whole and next(rest, _END) is not _END:
        # The state after the last batch belongs to the loader's next pass, which must not lose its first batch.
        loader.load_state_dict(copy.deepcopy(state))
        return iter(())
    return rest


def between_passes(loader: Any, state: Any, begun: bool, whole: bool) -> Iterator[Any] | None:
    """Load ``state``, which was saved between two passes, so that the next iteration begins a new pass.

    Args:
        loader: a stateful loader.
        state: a result of its ``state_dict``.
        begun: whether a pass had yielded a batch or had ended.
        whole: as in :func:`rest_of_pass`.

    Returns: The remaining batches of a pass that a limit or the user ended early, which must be passed to :func:`leave`
    before the next pass; else ``None``.
    """
    if not begun or hasattr(loader, "__next__"):  # an object that is its own iterator continues at its position
        loader.load_state_dict(copy.deepcopy(state))
        return None
    rest = rest_of_pass(loader, state, whole)
    return None if whole else rest


def leave(rest: Iterator[Any]) -> None:
    """Abandon ``rest``, but first make sure that it has begun.

    The body of a generator function only runs when its first batch is requested. Before that, the loader has not used
    the state that was loaded, and the loader's next pass would yield the rest of the old pass.
    """
    if isinstance(rest, GeneratorType) and inspect.getgeneratorstate(rest) == inspect.GEN_CREATED:
        next(rest, None)
