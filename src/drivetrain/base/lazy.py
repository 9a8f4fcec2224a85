"""A package's public names, each imported when it is first asked for: a program pays for what it uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        files: by public name, the module that defines it, relative to the package; one beside it begins with a dot.
    """

    def get(name: str) -> Any:
        if name not in files:
            from drivetrain.errors import did_you_mean

            raise AttributeError(f"module {package!r} has no attribute {name!r}. {did_you_mean(name, files)}")
        value = getattr(importlib.import_module(f".{files[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *files})

    return get, names
