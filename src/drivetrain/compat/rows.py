"""Reads the tables of Lightning's modules that drivetrain replaces: texts with one row per module.

A row is the path of a module of Lightning, followed by the module's sources. A source is a module of drivetrain,
followed by the names to take from this module. " | " separates sources. An indented line continues the row above. A
line that begins with "#" is a comment::

    pytorch.callbacks.timer .callbacks.timer: Timer | .compat.enums: Interval
    fabric.fabric .engine.engine: Fabric=Engine
    pytorch.loggers.{comet mlflow} .loggers
    fabric.accelerators.{cpu:CPUAccelerator cuda:CUDAAccelerator} .accelerators

The second row provides drivetrain's ``Engine`` as ``Fabric``. A source without names provides all names in its
``__all__``. A source that begins with a dot is below ``drivetrain``. The third line stands for two rows. The first of
the two, ``pytorch.loggers.comet``, has the names that drivetrain's package ``loggers`` imports from its own file
``comet``. The fourth line also stands for two rows; the row of ``cpu`` has only the name ``CPUAccelerator``. The path
"-" is the top-level package. The source "*" means the sources of all modules directly below the row's module. The
source "=path" means the sources of the row ``path`` in this table, or in the table ``later`` of a later version (see
:func:`table_of`). The source "=" means the sources of the row with the same path in ``later``. A row whose path begins
with "*" is not a module; other rows refer to the row.
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
    """Return the sources of each module, by the module's path.

    Args:
        text: the rows.
        later: the table of a later Lightning version; ``text`` can refer to rows of this table.
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
