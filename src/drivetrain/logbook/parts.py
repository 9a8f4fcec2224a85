"""Combine the values that the replicas of a module log about parts of one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.errors import LoggingError
from drivetrain.logbook.entry import STACKED, Entry, Options
from drivetrain.logbook.logbook import Logbook

_OPENING = threading.Lock()  # replicas may run in threads


class _Pushed(NamedTuple):
    """A value that a replica has logged, and the number of samples that the value covers."""

    value: Any
    samples: Any
    given: bool  # whether the user passed ``batch_size``


class PartEntry:
    """Replaces an :class:`Entry` on one replica, and stores the logged values."""

    def __init__(self, entry: Entry, options: Options, samples: int) -> None:
        self.entry, self.options, self._samples = entry, options, samples
        self.pushed: list[_Pushed] = []

    def push(self, value: Any, batch_size: Any) -> None:
        """Store one value. :func:`merge` combines the values of the replicas."""
        if isinstance(value, Tensor):
            value = self.entry._as_scalar(value) if value.ndim else value
            value = value.clone() if self.entry.keep_graph else value.detach().clone()
        elif not isinstance(value, (int, float, nn.Module)):
            value = self.entry._as_number(value)
        if isinstance(value, nn.Module) and not (hasattr(value, "compute") and hasattr(value, "reset")):
            self.entry.push(value, batch_size)  # raises an error
        given = batch_size is not None
        self.pushed.append(_Pushed(value, batch_size if given else self._samples, given))


class _Scope:
    """Replaces a :class:`~drivetrain.logbook.logbook.Scope` on one replica. The replacement has only the members that
    ``self.log`` reads.
    """

    def __init__(self) -> None:
        self.entries: dict[str, PartEntry] = {}


class PartBook:
    """Replaces the logbook on one replica during one step.

    Args:
        book: the logbook of the run.
        samples: the number of samples in this replica's part of the batch.
    """

    def __init__(self, book: Logbook, samples: int) -> None:
        self._book, self._samples = book, samples
        self.scope = _Scope()

    def open_entry(self, name: str, value: Any, options: Options, batch_size: Any = None) -> PartEntry:
        """Check the arguments in the logbook, and return this replica's entry."""
        with _OPENING:
            entry = self._book.open_entry(name, value, options, batch_size)
        return self.scope.entries.setdefault(name, PartEntry(entry, options, self._samples))


def logging_into(module: nn.Module, book: Any) -> AbstractContextManager[None]:
    """Return a context in which ``module`` and its submodules log into ``book``. A module without a logbook still logs
    nothing.
    """
    return replaced_in(module, "_book", lambda own: None if own is None else book)


def without_logging(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which all values that ``module`` and its submodules log are discarded."""
    return replaced_in(module, "_book", lambda own: _NoBook())


@contextmanager
def replaced_in(module: nn.Module, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Return a context in which the attribute ``name`` of each LightningModule in ``module`` has the value
    ``make(old_value)``.
    """
    own = {each: each.__dict__[name] for each in module.modules() if name in each.__dict__}
    for each, value in own.items():
        each.__dict__[name] = make(value)
    try:
        yield
    finally:
        for each, value in own.items():
            each.__dict__[name] = value


class _NoBook:
    """Replaces a logbook and an entry, and discards all logged values."""

    scope = None

    def open_entry(self, *args: Any) -> _NoBook:
        return self

    def push(self, *args: Any) -> None:
        pass


def merge(books: Sequence[PartBook], device: torch.device) -> None:
    """Combine the replicas' values, and log the results in the logbook. For each name, the first values of all replicas
    become one value, then the second values, and so on.

    In a mean, the weight of a value is the number of samples. Sums, minima and maxima have no weights.

    Args:
        books: the books of the replicas, in the order of the parts of the batch.
        device: the device on which values are combined.
    """
    for name in dict.fromkeys(name for book in books for name in book.scope.entries):
        parts = [book.scope.entries[name] for book in books if name in book.scope.entries]
        for index in range(max(len(part.pushed) for part in parts)):
            pushed = [part.pushed[index] for part in parts if index < len(part.pushed)]
            everywhere = len(pushed) == len(books) and not any(each.given for each in pushed)
            samples = None if everywhere else sum(each.samples for each in pushed)
            parts[0].entry.push(_one_of(name, parts[0].entry, pushed, device), samples)


def _one_of(name: str, entry: Entry, pushed: Sequence[_Pushed], device: torch.device) -> Any:
    values = [each.value for each in pushed]
    if isinstance(values[0], nn.Module):
        if any(value is not values[0] for value in values):
            raise LoggingError(
                f"self.log({name!r}, ...) got a different {type(values[0]).__name__} on each device. Update and log "
                "metric objects in training_step_end, validation_step_end or test_step_end."
            )
        return values[0]
    if any(isinstance(value, Tensor) for value in values):
        return _one_tensor(entry, values, [each.samples for each in pushed], device)
    if entry.reduction == "mean":
        total = sum(each.samples for each in pushed)
        return sum(each.value * each.samples for each in pushed) / total if total else values[0]
    reductions: dict[str, Callable[..., Any]] = {"sum": sum, "min": min, "max": max}
    return reductions[entry.reduction](values)


def _one_tensor(entry: Entry, values: Sequence[Any], samples: Sequence[Any], device: torch.device) -> Any:
    scalars = [value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for value in values]
    if entry.reduction == "mean":
        total = sum(samples)
        if not isinstance(total, Tensor) and not total:
            return scalars[0]
        return sum(scalar * (each / total) for scalar, each in zip(scalars, samples, strict=True))
    stacked = torch.stack([torch.as_tensor(scalar, device=device) for scalar in scalars])
    return STACKED[entry.reduction](stacked)
