"""The command ``drivetrain goodput``: print where the wall time of a training went, summed over its restarts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.cli.failed import failed

with on_first_use:
    from drivetrain.loops import goodput


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Print where the wall time of a training went, from the ledger that GoodputMonitor writes."
    )
    made.add_argument("path", metavar="PATH", help="the ledger, or the folder of checkpoints with ledger.jsonl")
    made.add_argument("--json", action="store_true", help="print all figures as JSON")
    return made


def main(arguments: Sequence[str], prog: str = "drivetrain goodput") -> int:
    """Print a report about a ledger, the file in which GoodputMonitor records times. Return 2 if there is no ledger."""
    given = parser(prog).parse_args(arguments)
    path = os.path.join(given.path, goodput.NAME) if os.path.isdir(given.path) else given.path
    report, why = goodput.Report(), "is an address, and a ledger is a local file"
    try:
        if not files.is_remote(path):
            report = goodput.account(*goodput.read(path))
            why = f"has no record of a run, and lines that are cut or of another version: {report.unread}"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    if not report.runs:
        return failed(f"{prog}: {path} {why}. Pass the ledger or its folder.", given.json)
    if given.json:
        print(json.dumps({"goodput": report.goodput, **asdict(report)}))
        return 0
    print(report.line())
    for name, seconds in report.seconds.items():
        print(f"{name:<12}{seconds:>14.1f} s {seconds / (report.wall_s or 1):>8.1%}")
    for note in report.notes():
        print(note)
    return 0
