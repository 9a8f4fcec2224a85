"""The tables of the modules that drivetrain provides, one table per supported version of Lightning (a generation). One
of the tables is in use in this process.

The rows of the tables are in files called ``served.txt``, here and in the folders of ``drivetrain.legacy``.
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
    """The modules of one version of Lightning.

    Attributes:
        version: the version's number.
        roots: for each replaced top-level package, the path of its row.
        folder: the folder below ``drivetrain`` that contains the rows. The rows are read when a program imports
            Lightning.
        distributions: the names of Lightning's distributions for ``importlib.metadata``.
        later: the folder with the rows of a later version; rows of this table can refer to those rows.
    """

    version: str
    roots: Mapping[str, str]
    folder: str
    distributions: tuple[str, ...]
    later: str = ""

    @property
    def served(self) -> Mapping[str, rows.Sources]:
        """The sources of each module, by the module's path."""
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
"""The tables of earlier versions of Lightning, by the name of the generation."""

_in_use = [LATEST]


def in_use() -> Table:
    """Return the table in use."""
    return _in_use[0]


def use(generation: str) -> None:
    """Change the table in use to the table of ``generation``; "" is the latest."""
    _in_use[0] = GENERATIONS[generation] if generation else LATEST
