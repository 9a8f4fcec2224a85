"""Call a step of which nothing that it logs is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _NoBook:
    """Takes what is logged, and keeps nothing."""

    scope = options = None

    def open_entry(self, *_: Any) -> _NoBook:
        return self

    def push(self, *_: Any) -> None: ...


@contextmanager
def without_logging(module: nn.Module) -> Iterator[None]:
    """Context in which what ``module`` and the modules in it log is discarded."""
    books = {each: each.__dict__["_book"] for each in module.modules() if "_book" in each.__dict__}
    for each in books:
        each.__dict__["_book"] = _NoBook()
    try:
        yield
    finally:
        for each, book in books.items():
            each.__dict__["_book"] = book
