"""Resume loaders that have a ``state_dict`` of their own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

_END = object()  # what next() returns at a loader's end: None may be a batch


def is_stateful(loader: Any) -> bool:
    """Return whether ``loader`` can save where it is, and take that back."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def rest_of_pass(loader: Any, state: Any, whole: bool) -> Iterator[Any]:
    """Load ``state`` and return the batches of its pass that are left.

    Args:
        loader: a stateful one.
        state: what its ``state_dict`` returned.
        whole: all batches of the pass were given; whether the loader was asked for its end does not matter.
    """
    loader.load_state_dict(state)
    rest: Iterator[Any] = iter(loader)
    if whole and next(rest, _END) is not _END:
        # Its state behind the last batch is that of its next pass, which must not lose a batch.
        loader.load_state_dict(state)
        return iter(())
    return rest


def between_passes(loader: Any, state: Any, begun: bool, whole: bool) -> Iterator[Any] | None:
    """Load ``state``, which was saved between two passes, so that the next iteration begins a new pass.

    Args:
        loader: a stateful one.
        state: what its ``state_dict`` returned.
        begun: a pass had given a batch or ended.
        whole: as of :func:`rest_of_pass`.

    Returns:
        What is left of a pass that a limit or the user cut short, for :func:`leave` when the next one begins.
    """
    if not begun or hasattr(loader, "__next__"):  # one that is its own iterator continues where it is
        loader.load_state_dict(state)
        return None
    rest = rest_of_pass(loader, state, whole)
    return None if whole else rest


def leave(rest: Iterator[Any]) -> None:
    """Give up ``rest``. The loader must have begun it, or would give it again in its next pass.

    The body of a generator function runs when its first batch is asked for, so the loaded state is still waiting there.
    """
    if isinstance(rest, GeneratorType) and inspect.getgeneratorstate(rest) == inspect.GEN_CREATED:
        next(rest, None)
