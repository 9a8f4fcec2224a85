"""The tables of Lightning's available modules, one per generation, and which table this process uses.

The tables' rows are in ``served.py``, here and in the folders of the earlier generations.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple


class Table(NamedTuple):
    """The modules of one generation of the original.

    Attributes:
        version: the version of the original with these names.
        roots: the replaced top-level packages, and the path for each.
        rows: the module with the rows, as ``SERVED``; it is imported when a program imports the original.
        distributions: its names for ``importlib.metadata``.
    """

    version: str
    roots: Mapping[str, str]
    rows: str
    distributions: tuple[str, ...]

    @property
    def served(self) -> Mapping[str, tuple[str, ...]]:
        """The sources of each module, by path."""
        return importlib.import_module(self.rows).SERVED


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
    """Use the modules of ``generation`` from now on; "" is the latest."""
    _in_use[0] = GENERATIONS[generation] if generation else LATEST
