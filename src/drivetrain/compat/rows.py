"""The text format of the tables of replaced modules: a row for each module of Lightning.

A row is a module's path and its sources, separated by " | "; an indented line continues the row above, and a line that
begins with "#" is a comment::

    pytorch.callbacks.timer .callbacks.timer: Timer | .compat.enums: Interval
    fabric.fabric .engine.engine: Fabric=Engine
    pytorch.loggers.{comet mlflow} .loggers
    fabric.accelerators.{cpu:CPUAccelerator cuda:CUDAAccelerator} .accelerators

The second row provides our ``Engine`` as ``Fabric``. A module of ours without names provides its ``__all__``; one that
begins with a dot is below ``drivetrain``. The third line abbreviates two rows: each provides the names that our package
``loggers`` has from its file of that name. So does the fourth; each of its rows provides only the name after the colon.
Other signs: "-" is the path of the top-level package, "*" as a source means the sources of all modules directly
below the row's, and "=path" those of another row, in this table or in ``later``; "=" alone means the same path in
``later``. A row whose path begins with "*" is only referred to by others, and is not a module.
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
    """Return the sources of each module, by its path.

    Args:
        text: the rows.
        later: the table of a later generation, to whose rows this one may refer.
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
