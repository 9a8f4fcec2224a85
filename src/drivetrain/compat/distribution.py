"""The metadata that ``importlib.metadata`` reports for Lightning's distributions: Lightning's version, and a dependency
on drivetrain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

from drivetrain.compat import table


class ServedDistribution(Distribution):
    """An entry of ``importlib.metadata`` for one of Lightning's distributions, such as "pytorch-lightning"."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """Return the text of a metadata file; ``None`` if the file does not exist."""
        if filename == "METADATA":
            return (
                f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {table.in_use().version}\n"
                "Summary: Served by drivetrain.compat\nRequires-Dist: drivetrain\n"
            )
        return f"{self._name.replace('-', '_')}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return the path that a file of this distribution would have."""
        return Path(__file__).parent / path


def distributions(name: str | None) -> Iterator[Distribution]:
    """Yield Lightning's distribution called ``name``, in any spelling; for ``None``, yield all Lightning
    distributions.
    """
    wanted = None if name is None else re.sub(r"[-_.]+", "-", name).lower()
    return (ServedDistribution(name) for name in table.in_use().distributions if wanted in (None, name))
