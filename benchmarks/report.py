"""What the benchmarks share: a table on the screen, a JSON file, and which versions were measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ["torch", "drivetrain", "lightning", "accelerate", "pytorch-ignite", "torchtnt"]


def versions() -> dict[str, str | int | None]:
    """The machine, Python and the measured packages; ``None`` where a package is not installed."""
    found: dict[str, str | int | None] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A Markdown table, its columns aligned: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if index == 0 else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    for row in [header, rule, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        print(f"| {' | '.join(cells)} |")


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path``, whose folder is made if need be."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
