"""The tables of Lightning's modules that are available, one for each generation, and which of them is in use.

``served.py``, here and in the folders of the earlier generations, has the rows of the tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple


class Table(NamedTuple):
    """The modules of one generation of the original.

    Attributes:
        version: of the original whose names these are.
        roots: top-level packages that are replaced, and the path for which each of them stands.
        rows: the module that has the rows, as ``SERVED``; it is imported when a program imports the original.
        distributions: the names under which ``importlib.metadata`` finds it.
    """

    version: str
    roots: Mapping[str, str]
    rows: str
    distributions: tuple[str, ...]

    @property
    def served(self) -> Mapping[str, tuple[str, ...]]:
        """By path, the sources of a module."""
        found: Mapping[str, tuple[str, ...]] = importlib.import_module(self.rows).SERVED
        return found


LATEST = Table(
    "2.6.6",
    {"lightning": "", "pytorch_lightning": "pytorch", "lightning_fabric": "fabric"},
    "drivetrain.compat.served",
    ("lightning", "pytorch-lightning", "lightning-fabric"),
)

_ONE_ROOT, _ONE_NAME = {"pytorch_lightning": ""}, ("pytorch-lightning",)

GENERATIONS = {
    "1.1": Table("1.1.0", _ONE_ROOT, "drivetrain.legacy.v1_1.served", _ONE_NAME),
    "1.3": Table("1.3.8", _ONE_ROOT, "drivetrain.legacy.v1_3.served", _ONE_NAME),
}
"""The tables of earlier generations."""

_in_use = [LATEST]


def in_use() -> Table:
    """Return the table of the generation that is installed."""
    return _in_use[0]


def use(generation: str) -> None:
    """Let the modules of ``generation`` be served from now on; "" is the latest."""
    _in_use[0] = GENERATIONS[generation] if generation else LATEST
