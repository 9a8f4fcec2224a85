"""The command ``drivetrain conformance``: check whether a user's own strategy, logger or other extension works with
drivetrain.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import drivetrain
from drivetrain.base.lazy import on_first_use
from drivetrain.errors import DrivetrainError

with on_first_use:
    from drivetrain.testing import checks

SCHEMA = 1
"""The version of the JSON output. It increases when a key is removed or gets another meaning."""

KINDS = ("accelerator", "strategy", "launcher", "cluster", "logger", "store", "precision", "loader")


def main(arguments: Sequence[str], prog: str = "drivetrain conformance") -> int:
    """Run the checks for a user's extension, such as a strategy, and print their results.

    Returns:
        0 if all checks pass, 1 if a check fails, 2 if the extension could not be created.
    """
    given = parser(prog).parse_args(arguments)

    outcomes: list[checks.Outcome] = []
    error = None
    sys.path.insert(0, os.getcwd())  # so that the working directory can be imported from, as with ``python -m``
    with _printing_to_stderr() as out:
        try:
            part = checks.Part(given.kind, given.part, given.args, given.settings)
            for each in checks.run_checks(part, given.check):
                outcomes.append(each)
                if not (given.json or given.badge):
                    print(*_lines(each), sep="\n", file=out, flush=True)
        except DrivetrainError as failure:
            error = str(failure)
    counts = {result: sum(each.result == result for each in outcomes) for result in ("ok", "fails", "skipped")}
    if given.json:
        print(_json(given, outcomes, counts, error))
    if error is not None:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    if given.badge:
        print(badge(given.kind, counts))
    elif not given.json:
        print(f"{given.kind} {given.part}: {counts['ok']} ok, {counts['fails']} failed, {counts['skipped']} skipped")
    return 1 if counts["fails"] else 0


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Check that a part of yours keeps the contract of its kind. Exit code 0: all checks pass; "
        "1: a check fails; 2: the part could not be tried.",
        allow_abbrev=False,
    )  # fmt: skip
    made.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    made.add_argument(
        "part", metavar="PATH_OR_NAME", help="package.module:Class, file.py:Class, or a registered name; a function "
        "that returns such a part may be in place of the class",
    )  # fmt: skip
    made.add_argument("--args", type=_mapping, default={}, metavar="JSON", help="keyword arguments of the class")
    made.add_argument(
        "--settings", type=_mapping, default={}, metavar="JSON", help='settings of the kit, such as {"devices": 2}'
    )
    made.add_argument("--check", metavar="NAME", help="run only this check")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the results as JSON")
    form.add_argument("--badge", action="store_true", help="print one line of Markdown with a badge")
    return made


def _mapping(text: str) -> dict[str, Any]:
    value = json.loads(text)  # argparse turns a ValueError into its error message
    if not isinstance(value, dict):
        raise ValueError
    return value


_mapping.__name__ = "JSON object"  # argparse shows this name in its error message


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[Any]:
    """Redirect the standard output of this process and its children to stderr. Yield the original standard output."""
    sys.stdout.flush()
    real = os.dup(1)
    try:
        os.dup2(2, 1)
        with open(real, "w", closefd=False) as out, contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        os.dup2(real, 1)
        os.close(real)


def _lines(outcome: checks.Outcome) -> list[str]:
    row = f"{outcome.result:<8}{outcome.name:<54}{outcome.seconds:>7.1f} s"
    if outcome.result == "fails":
        return [row, f"        seen:     {outcome.seen}", f"        expected: {outcome.sentence}"]
    return [f"{row}  {outcome.seen}".rstrip()]


def _json(given: argparse.Namespace, outcomes: list[checks.Outcome], counts: dict[str, int], error: str | None) -> str:
    checks = [{**each._asdict(), "seconds": round(each.seconds, 3)} for each in outcomes]
    report = {"schema": SCHEMA, "drivetrain": drivetrain.__version__, "kind": given.kind, "part": given.part}
    return json.dumps({**report, "error": error, "counts": counts, "checks": checks}, indent=2)


def badge(kind: str, counts: dict[str, int]) -> str:
    """Return Markdown for a badge with the result. Its picture comes from shields.io."""
    passed, run = counts["ok"], counts["ok"] + counts["fails"]
    texts = f"drivetrain {drivetrain.__version__} {kind}", f"{passed} of {run} checks"
    color = "red" if counts["fails"] else "brightgreen"
    label, message = (text.replace("-", "--").replace("_", "__").replace(" ", "_") for text in texts)
    return f"![{texts[0]}: {texts[1]}](https://img.shields.io/badge/{label}-{message}-{color})"
