"""The command ``drivetrain report``: write an HTML page about a run, or about the differences between two runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict

from drivetrain.base import files
from drivetrain.cli.failed import failed
from drivetrain.report.comparing import differences, slower, summary
from drivetrain.report.page import comparison, page
from drivetrain.report.reading import NothingToRead, Run, find, read
from drivetrain.report.sections import headline

SCHEMA = 1
"""The version of the JSON output."""

FINE, SLOWER = 0, 1
"""Exit codes. SLOWER: a run is slower than --max-slower allows. 2: wrong usage, or there is no run to read."""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Write one HTML page on a run, or on what differs between two runs.", allow_abbrev=False,
        epilog="exit codes: 0 fine, 1 slower than --max-slower allows, 2 wrong usage or nothing to read",
    )  # fmt: skip
    made.add_argument("run", metavar="RUN", nargs="+", help="a log folder, a folder that contains some, or a run.json")
    made.add_argument("--output", metavar="FILE", help="the page; default: report.html in the folder of the last RUN")
    made.add_argument("--json", action="store_true", help="print the report as JSON; write a page only with --output")
    made.add_argument(
        "--max-slower",
        metavar="5%",
        type=_share,
        help="with two runs: exit with 1 if a step of the second takes longer",
    )
    return made


def main(arguments: Sequence[str], prog: str = "drivetrain report") -> int:
    """Write the report, print its path, and return the exit code."""
    made = parser(prog)
    given = made.parse_args(arguments)
    if len(given.run) > 2:
        made.error(f"there are {len(given.run)} runs, and two can be compared. Pass one or two.")
    if given.max_slower is not None and len(given.run) != 2:
        made.error("--max-slower compares two runs. Pass RUN twice, the earlier one first.")
    try:
        runs = [_run(path, prog, continues=len(given.run) == 1) for path in given.run]
        ratio = None if given.max_slower is None else slower(*runs)
        if given.max_slower is not None and ratio is None:
            raise NothingToRead("the time of a step is unknown: both runs need a run.json of a fit that has ended.")
        _write(runs, given.output, given.json)
    except (NothingToRead, OSError) as error:
        return failed(f"{prog}: {error}", given.json)
    if ratio is None:
        return FINE
    is_slower = ratio > given.max_slower
    verdict = f"{abs(ratio):.1%} {'longer' if ratio > 0 else 'less time'}; --max-slower allows {given.max_slower:.1%}"
    print(f"A step of the second run takes {verdict}.", file=sys.stderr)
    return SLOWER if is_slower else FINE


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, and a percentage is expected, such as 5%")
    return float(found[1]) / 100


def _run(path: str, prog: str, continues: bool) -> Run:
    folder, count = find(path)
    if count > 1:
        print(f"{prog}: {path} has {count} runs; this is the newest, {folder}.", file=sys.stderr)
    return read(folder, continues)


def _write(runs: list[Run], output: str | None, as_json: bool) -> None:
    said = _as_json(runs) if as_json else "\n".join(f"{headline(run)}." for run in runs)
    if output is not None or not as_json:
        name = "report.html" if len(runs) == 1 else "comparison.html"
        path = output or os.path.join(runs[-1].folder, name)
        if os.path.isdir(path):
            raise NothingToRead(f"{path} is a folder. Pass a file, such as --output {os.path.join(path, name)}.")
        content = (page(*runs) if len(runs) == 1 else comparison(*runs)).encode()
        try:
            files.write(path, content)
        except OSError as error:
            raise NothingToRead(f"{path} cannot be written: {error.strerror}. Pass --output FILE.") from error
        said += "" if as_json else f"\nReport: {path} ({len(content) / 1000:.0f} kB)"
    print(said)


def _as_json(runs: list[Run]) -> str:
    """Return the reports as JSON, without NaN and infinity."""
    found = [
        {**asdict(run), "headline": headline(run), "seconds_per_step": run.step_s, "values": summary(run)}
        for run in runs
    ]
    data = {"schema": SCHEMA, "runs": found, "differences": differences(*runs) if len(runs) == 2 else None}
    return json.dumps(json.loads(json.dumps(data), parse_constant=lambda name: None))
