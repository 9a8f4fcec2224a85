"""The tables of Lightning's modules that drivetrain replaces. There is a table for each supported version of Lightning,
also called a generation. A process uses one of these tables.

The rows are in the files ``served.txt`` of this folder and of the folders in ``drivetrain.legacy``; see
:mod:`drivetrain.compat.rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from drivetrain.base.lazy import on_first_use

with on_first_use:
    from drivetrain.compat import rows


class Table(NamedTuple):
    """The modules of one Lightning version.

    Attributes:
        version: the version's number.
        roots: the top-level packages of this version, and for each the path of its row; "" is the row "-".
        folder: the folder below ``drivetrain`` whose ``served.txt`` has the rows.
        distributions: the names of Lightning's distributions for ``importlib.metadata``.
        later: the folder of a later version, to whose rows the rows of this version can refer.
    """

    version: str
    roots: Mapping[str, str]
    folder: str
    distributions: tuple[str, ...]
    later: str = ""

    @property
    def served(self) -> Mapping[str, rows.Sources]:
        """The sources of Lightning's modules, by the modules' paths; read when first used."""
        return _read(self.folder, self.later)


@functools.cache
def _read(folder: str, later: str = "") -> Mapping[str, rows.Sources]:
    text = (Path(__file__).parents[1] / folder / "served.txt").read_text(encoding="utf-8")
    return rows.table_of(text, _read(later) if later else MappingProxyType({}))


LATEST = Table(
    "2.6.6",
    {"lightning": "", "pytorch_lightning": "pytorch", "lightning_fabric": "fabric"},
    "compat",
    ("lightning", "pytorch-lightning", "lightning-fabric"),
)

_ONE_ROOT, _ONE_NAME = {"pytorch_lightning": ""}, ("pytorch-lightning",)

GENERATIONS = {
    "1.1": Table("1.1.0", _ONE_ROOT, "legacy/v1_1", _ONE_NAME, later="legacy/v1_3"),
    "1.3": Table("1.3.8", _ONE_ROOT, "legacy/v1_3", _ONE_NAME),
}
"""The tables of earlier Lightning versions."""

_in_use = [LATEST]


def in_use() -> Table:
    """Return the table that this process uses."""
    return _in_use[0]


def use(generation: str) -> None:
    """Use the table of ``generation`` from now on; "" means the latest version."""
    _in_use[0] = GENERATIONS[generation] if generation else LATEST
