"""The tables of Lightning's modules that are available, one for each generation, and which of them is in use.

``served.py``, here and in the folders of the earlier generations, has the tables themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple

from drivetrain.compat.served import FORMER_PATHS as FORMER_PATHS
from drivetrain.compat.served import ROOTS as ROOTS
from drivetrain.compat.served import SERVED as SERVED
from drivetrain.compat.served import VERSION as VERSION


class Table(NamedTuple):
    """The modules of one generation of the original.

    Attributes:
        version: of the original whose names these are.
        roots: top-level packages that are replaced, and the path for which each of them stands.
        served: by path, the sources of a module.
        distributions: the names under which ``importlib.metadata`` finds it.
    """

    version: str
    roots: Mapping[str, str]
    served: Mapping[str, tuple[str, ...]]
    distributions: tuple[str, ...]


LATEST = Table(VERSION, ROOTS, SERVED, ("lightning", "pytorch-lightning", "lightning-fabric"))

GENERATIONS = {"1.1": "drivetrain.legacy.v1_1.served", "1.3": "drivetrain.legacy.v1_3.served"}
"""Earlier generations, and the modules whose ``TABLE`` has their names."""

_in_use = [LATEST]


def in_use() -> Table:
    """Return the table of the generation that is installed."""
    return _in_use[0]


def use(generation: str) -> None:
    """Let the modules of ``generation`` be served from now on; "" is the latest."""
    _in_use[0] = importlib.import_module(GENERATIONS[generation]).TABLE if generation else LATEST
