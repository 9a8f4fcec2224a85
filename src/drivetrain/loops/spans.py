"""Report the actions of a run, such as ``run_training_batch``, to a profiler. Without a profiler, no object of this
module is created.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

Call = Callable[..., Any]

_BATCHES = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}
"""The word in a stage's hook names -> the word in the stage's loader name."""

_AROUND = {
    "on_train_start": ("run_training", True), "on_train_end": ("run_training", False),
    "on_train_epoch_start": ("run_training_epoch", True), "on_train_epoch_end": ("run_training_epoch", False),
    "on_train_batch_end": ("run_training_batch", False),
    "on_validation_start": ("run_validation", True), "on_validation_end": ("run_validation", False),
    "on_validation_batch_end": ("run_validation_batch", False),
    "on_test_start": ("run_test", True), "on_test_end": ("run_test", False),
    "on_test_batch_end": ("run_test_batch", False),
    "on_predict_start": ("run_predict", True), "on_predict_end": ("run_predict", False),
    "on_predict_batch_end": ("run_predict_batch", False),
}  # fmt: skip
"""Hook -> an action and a flag. True: the action begins before the hook; False: the action ends after the hook. Actions
of batches begin in :meth:`Spans.batches`, because no hook is called at that point.
"""


class Spans:
    """Wraps the functions of a run, so that a profiler measures each call as a named action.

    Args:
        profiler: measures the actions.
    """

    def __init__(self, profiler: Any) -> None:
        self._start, self._stop = profiler.start, profiler.stop
        self._open: list[str] = []  # the running actions that end at a hook, outermost first

    def wrap(self, action: str, call: Call) -> Call:
        """Return a function that runs ``call`` and measures it as ``action``."""
        start, stop = self._start, self._stop

        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            start(action)
            try:
                return call(*args, **kwargs)
            finally:
                stop(action)

        return measured

    def of_hook(self, owner: Any, kind: str, hook: str) -> Call:
        """Return a function that runs a hook of ``owner`` and measures it as an action, for example
        ``[Callback]EarlyStopping.on_train_epoch_end``.
        """
        return self.wrap(f"[{kind}]{type(owner).__name__}.{hook}", getattr(owner, hook))

    def around(self, hook: str, bound: tuple[Call, ...]) -> tuple[Call, ...]:
        """Return the callables of ``hook``. If an action begins or ends at this hook, add a callable that begins or
        ends the action.
        """
        if hook not in _AROUND:
            return bound
        action, begins = _AROUND[hook]
        if begins:
            return (lambda *_, **__: self.begin(action), *bound)
        return (*bound, lambda *_, **__: self.end(action))

    def begin(self, action: str) -> None:
        """Begin an action, which ends when :meth:`end` is called."""
        self.end(action)  # if an exception or a skipped hook left the action open
        self._open.append(action)
        self._start(action)

    def end(self, action: str) -> None:
        """End an action, and all actions inside this action. Do nothing if the action is not running."""
        while action in self._open:
            self._stop(self._open.pop())

    def end_all(self) -> None:
        """End all open actions."""
        while self._open:
            self._stop(self._open.pop())

    def batches(self, word: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield from ``batches``. The wait for each batch is one action; the work on the batch is another."""
        fetch = f"{_BATCHES[word]}_dataloader_next"
        work = f"run_{'training' if word == 'train' else word}_batch"
        fetched = self.wrap(fetch, lambda: next(batches, batches))
        while (batch := fetched()) is not batches:
            self.begin(work)
            yield batch
            self.end(work)  # if an exception or a skipped hook left the action open
        self.end(work)
