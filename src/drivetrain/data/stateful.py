"""Resume passes over loaders that save their position themselves, with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any

_END = object()  # the default of next(), because None may be a batch


def is_stateful(loader: Any) -> bool:
    """Return whether ``loader`` can save and restore its position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def samples_of_all_ranks(position: Any) -> int | None:
    """Return how many samples of the epoch all ranks together have received. Return ``None`` if the loader's state does
    not contain this number.

    The number is the entry ``sample_in_epoch`` of the loader's state, or of the dataset's state inside the loader's
    state. If its state has this entry, a loader can divide the rest of the epoch among any number of ranks.

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
        state: a result of the loader's ``state_dict``.
        whole: whether the pass had yielded all of its batches.
    """
    loader.load_state_dict(copy.deepcopy(state))
    rest: Iterator[Any] = iter(loader)
    if whole and next(rest, _END) is not _END:
        # The loader has begun its next pass, because the state after the last batch belongs to the next pass. Load the
        # state again, so that the next pass does not lose its first batch.
        loader.load_state_dict(copy.deepcopy(state))
        return iter(())
    return rest


def between_passes(loader: Any, state: Any, begun: bool, whole: bool) -> Iterator[Any] | None:
    """Load ``state``, which was saved between two passes, so that the next iteration begins a new pass.

    Args:
        loader: a stateful loader.
        state: a result of the loader's ``state_dict``.
        begun: whether the saved pass had yielded a batch or had ended.
        whole: as in :func:`rest_of_pass`.

    Returns: The remaining batches, if a limit or the user had ended the pass early. The caller must pass them to
    :func:`leave` before the next pass. Otherwise ``None``.
    """
    if not begun or hasattr(loader, "__next__"):  # a loader that is its own iterator continues at its position
        loader.load_state_dict(copy.deepcopy(state))
        return None
    rest = rest_of_pass(loader, state, whole)
    return None if whole else rest


def leave(rest: Iterator[Any]) -> None:
    """Abandon ``rest``. If ``rest`` has not begun, first fetch its first batch.

    The code of a generator function runs only when the first batch is requested. Until then, the loader has not used
    the loaded state. Without this fetch, the loader's next pass would yield the rest of the old pass.
    """
    if isinstance(rest, GeneratorType) and inspect.getgeneratorstate(rest) == inspect.GEN_CREATED:
        next(rest, None)
