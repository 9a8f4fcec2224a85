"""Reads the files ``served.txt``, which have a row for each module of Lightning that drivetrain replaces.

A row starts with the path of Lightning's module. After it come sources, separated by " | ". A source is a module of
drivetrain, and the names to take from it. An indented line continues the row above. A line that begins with "#" is a
comment::

    pytorch.callbacks.timer .callbacks.timer: Timer | .compat.enums: Interval
    fabric.fabric .engine.engine: Fabric=Engine
    pytorch.loggers.{comet mlflow} .loggers
    fabric.accelerators.{cpu:CPUAccelerator cuda:CUDAAccelerator} .accelerators

``Fabric=Engine`` provides drivetrain's ``Engine`` under the name ``Fabric``. A source that begins with a dot is a
module below ``drivetrain``. A source without names provides all names in its ``__all__``. Braces stand for several
rows. The third line defines ``pytorch.loggers.comet``, with the names that ``drivetrain.loggers`` imports from its file
``comet``, and ``pytorch.loggers.mlflow``. In the fourth line, ``fabric.accelerators.cpu`` has only the name
``CPUAccelerator``. The path "-" is the top-level package. The source "*" stands for the sources of all modules directly
below the row's module. The source "=path" stands for the sources of the row ``path`` in this file, or in the file of a
later version, ``later``. The source "=" stands for the sources of the row with the same path in ``later``. If a path
begins with "*", it is no module, but a name for other rows to use.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from drivetrain.base.lazy import names_of_file

Sources = tuple[str, ...]

_ROW = re.compile(r"([^{ ]+)(?:\{([^}]*)\})? *(.*)")


def table_of(text: str, later: Mapping[str, Sources] = MappingProxyType({})) -> dict[str, Sources]:
    """Return the sources of Lightning's modules, by the modules' paths.

    Args:
        text: the rows.
        later: the result for a later Lightning version, to whose rows ``text`` can refer.
    """
    rows: dict[str, Sources] = {}
    written_rows = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    for line in re.sub(r"\n +", " ", written_rows.strip()).splitlines():
        start, files, sources = _ROW.fullmatch(line).groups()  # type: ignore[union-attr]  # it matches any line
        for each in [""] if files is None else files.split():
            file, _, name = each.partition(":")
            path = "" if start == "-" else start + file
            rows[path] = tuple(_sources(sources, path, file, name, {**later, **rows}))
    for path, written in rows.items():
        if "*" in written:
            below = [source for other in rows if other.rpartition(".")[0] == path for source in rows[other]]
            rows[path] = (*below, *(source for source in written if source != "*"))
    return {path: sources for path, sources in rows.items() if not path.startswith("*")}


def _sources(written: str, path: str, file: str, name: str, rows: Mapping[str, Sources]) -> Iterator[str]:
    for source in filter(None, written.split(" | ")):
        if source.startswith("="):
            yield from rows[source[1:] or path]
            continue
        full = f"drivetrain{source}" if source.startswith(".") else source
        if name:
            full = f"{full}: {name}"
        elif file:
            names = names_of_file(importlib.import_module(full).__name__, file)
            full = f"{full}.{file}: {' '.join(names)}"
        yield full
