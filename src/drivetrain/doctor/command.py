"""The command ``drivetrain doctor``: lists the checks, runs them, and prints findings."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from drivetrain.doctor.checks import WRONG, Check, Result, run
from drivetrain.errors import did_you_mean

SCHEMA = 1
"""The version of the JSON output."""

CHECKS = (
    Check("versions", "drivetrain.doctor.versions:check", 20),
    Check("limits", "drivetrain.doctor.limits:check", 20),
    Check("clock", "drivetrain.doctor.clock:check", 20),
    Check("disk", "drivetrain.doctor.disk:check", 60),
    Check("devices", "drivetrain.doctor.devices:check", 120, uses_torch=True),
    Check("optimizers", "drivetrain.doctor.optimizers:check", 120, uses_torch=True),
    Check("processes", "drivetrain.doctor.processes:check", 60, uses_torch=True, ranks=2),
)  # fmt: skip


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    names = [check.name for check in CHECKS]
    made = argparse.ArgumentParser(
        prog, description="Check this machine and its torch: for each finding, what it is, what it means, and what to "
        "write. Exit code 0: nothing is wrong; 1: something is; 2: wrong usage. Notes do not change the exit code.",
    )  # fmt: skip
    made.add_argument("checks", nargs="*", metavar="CHECK", help=f"only these: {', '.join(names)}")
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain doctor") -> int:
    """Run the checks.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        0: no finding is "wrong". 1: a finding is "wrong". 130: Ctrl-C. Wrong usage raises ``SystemExit(2)``.
    """
    names = [check.name for check in CHECKS]
    made = parser(prog)
    given = made.parse_args(arguments)
    for name in given.checks:
        if name not in names:
            made.error(f"there is no check {name!r}. {did_you_mean(name, names)}")

    results, interrupted = list[Result](), False
    try:
        for check in CHECKS:
            if not given.checks or check.name in given.checks:
                results.append(run(check))
                if not given.json:
                    _print(results[-1])
    except KeyboardInterrupt:
        print(f"{prog}: interrupted.", file=sys.stderr)
        interrupted = True
    findings = [finding for result in results for finding in result.findings]
    wrong = sum(finding.severity == WRONG for finding in findings)
    if given.json:
        error = {"error": f"{prog}: interrupted."} if interrupted else {}
        checks = [asdict(each) for each in results]
        print(json.dumps({"schema": SCHEMA, "wrong": wrong, "checks": checks, **error}, indent=2))
    elif not interrupted:
        seconds = sum(result.seconds for result in results)
        print(f"{wrong} wrong, {len(findings) - wrong} to note, in {seconds:.0f} s.")
    return 130 if interrupted else int(wrong > 0)


def _print(result: Result) -> None:
    """Print the findings, or one line if there are none. Wrap lines if the output is a terminal."""
    lines = [
        f"{each.severity:<6}{result.name:<12}{each.what} {each.so_what} Write: {each.write}"
        for each in result.findings
    ] or [f"{'fine':<6}{result.name:<12}{'; '.join(result.facts)}"]  # fmt: skip
    for line in lines:
        if sys.stdout.isatty():
            line = textwrap.fill(line, max(shutil.get_terminal_size().columns, 40), subsequent_indent=" " * 18)
        print(line, flush=True)
