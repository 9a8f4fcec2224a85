"""How long imports take: each in a fresh interpreter, after ``import torch`` and beside it.

Every interpreter imports torch first and the package second, and times both. What a package adds to torch is so
measured in one process; as a difference of two processes, each of seconds, it would drown in their scatter. The order
favours nobody: all of these packages import torch anyway.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Any

from report import print_table, versions, write_json

STATEMENTS = {
    "torch alone": "pass",
    "drivetrain": "import drivetrain",
    "drivetrain: Trainer, LightningModule": "from drivetrain import Trainer, LightningModule",
    "accelerate": "from accelerate import Accelerator",
    "lightning.pytorch": "from lightning.pytorch import Trainer, LightningModule",
}

PROGRAM = """
import time
begin = time.perf_counter()
import torch
between = time.perf_counter()
{statement}
print(between - begin, time.perf_counter() - between)
"""


def import_once(statement: str) -> tuple[float, float] | None:
    """Seconds for torch and for ``statement`` after it; ``None`` if it cannot be imported."""
    program = PROGRAM.format(statement=statement)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    if done.returncode:
        return None
    torch_s, added_s = done.stdout.split()[-2:]
    return float(torch_s), float(added_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the results, all rounds included, to this file")
    arguments = parser.parse_args()

    # The first round fills the file cache and byte-compiles; it is not counted.
    available = [name for name, statement in STATEMENTS.items() if import_once(statement) is not None]
    if missing := [name for name in STATEMENTS if name not in available]:
        print(f"Cannot be imported, so not measured: {', '.join(missing)}", file=sys.stderr)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in available}
    for _ in range(arguments.rounds):
        for name in available:
            measured = import_once(STATEMENTS[name])
            assert measured is not None  # it could be imported a moment ago
            times[name].append(measured)

    rows: list[dict[str, Any]] = []
    for name, pairs in times.items():
        total_ms = statistics.median(torch_s + added_s for torch_s, added_s in pairs) * 1e3
        added_ms = statistics.median(added_s for _, added_s in pairs) * 1e3
        rows.append({"name": name, "total_ms": total_ms, "over_torch_ms": added_ms, "pairs_s": pairs})
    print_table(
        ["", "total ms", "over torch ms"],
        [[row["name"], f"{row['total_ms']:.0f}", f"{row['over_torch_ms']:.1f}"] for row in rows],
    )
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "rounds": arguments.rounds, "rows": rows})


if __name__ == "__main__":
    main()
