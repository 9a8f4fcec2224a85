"""Properties and methods of a class that delegate to another object, which is given by its path."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def reads(path: str, doc: str | None = None, writable: bool = False) -> Any:
    """Return a property with the value at ``path`` of the object, such as "trainer.progress.batch_idx"."""
    *owners, name = path.split(".")

    def write(this: Any, value: Any) -> None:
        setattr(attrgetter(".".join(owners))(this) if owners else this, name, value)

    return property(attrgetter(path), write if writable else None, doc=doc)


def calls(path: str) -> Any:
    """Return a method that calls the method at ``path`` of the object with its arguments."""
    find = attrgetter(path)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return find(self)(*args, **kwargs)

    method.__name__ = method.__qualname__ = path.rpartition(".")[2]  # for tracebacks
    return method
