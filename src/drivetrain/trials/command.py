"""The command ``drivetrain advise``: try each cure, a change that may make a program faster, and print the cures that
help.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import drivetrain
from drivetrain.cli.program import add_program_arguments, command_of, positive, program_parser, say
from drivetrain.errors import did_you_mean, number_of
from drivetrain.proof.runs import CannotTryError, installed_torch, signals_as_interrupts
from drivetrain.trials import NAMES
from drivetrain.trials.measuring import LEAST_GAIN, Result, Trials

SCHEMA = 1
"""The version of the JSON output."""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = program_parser(
        prog,
        "Run the first steps of a training program as it is and with one change at a time, each in a fresh process; "
        "print how much faster each change makes it, and what to write. The program must call trainer.fit. Neither "
        "checkpoints nor logs are written.",
        epilog="Exit codes: 0: measured, 1: the program fails or cannot be measured, 2: wrong usage, 130: interrupted.",
    )
    made.add_argument("--steps", type=positive, help="steps to measure (default: 20, or as many as take a second)")
    made.add_argument("--rounds", type=positive, default=3, help="most measurements of each change (default: 3)")
    made.add_argument(
        "--only", action="append", default=[], type=_cure, metavar="NAME",
        help=f"try only this, such as num_workers or num_workers=4; may be repeated. There are: {', '.join(NAMES)}",
    )  # fmt: skip
    made.add_argument("--timeout", type=float, default=3600.0, help="seconds for a trial (default: 3600)")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    add_program_arguments(made)
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain advise") -> int:
    """Try cures for the program in ``arguments``, and print the cures that make the program faster.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        0: the program was measured. 1: the program fails, or cannot be measured. 130: interrupted; the measurements so
        far are printed. Wrong usage raises ``SystemExit(2)``.
    """
    made = parser(prog)
    given = made.parse_args(arguments)
    command = command_of(given, made)
    result, code, why = Result(), 0, ""
    try:
        with tempfile.TemporaryDirectory(prefix="advise-", ignore_cleanup_errors=True) as name, signals_as_interrupts():
            Trials(command, Path(name), given.steps, given.timeout, say).run(result, given.rounds, given.only)
    except CannotTryError as error:
        say(why := f"{prog}: {given.program} cannot be measured: {error}")
        code = 1
    except KeyboardInterrupt:
        say(why := f"{prog}: interrupted; the program was ended")
        code = 128 + signal.SIGINT
    measured = bool(result.samples_per_s)
    if given.json:
        print(json.dumps(_as_json(given, result) if measured else {"error": why}))
    elif measured:
        print("\n".join(_lines(given, result)))
    return code


def _cure(text: str) -> str:
    if (name := text.partition("=")[0]) not in NAMES:
        raise argparse.ArgumentTypeError(f"there is no {name!r}. {did_you_mean(name, NAMES)}")
    return text


def _lines(given: argparse.Namespace, result: Result) -> list[str]:
    speeds, rounds = result.samples_per_s, len(result.samples_per_s)
    spread = f"{min(speeds):.4g} to {max(speeds):.4g}" if rounds > 1 else f"{speeds[0]:.4g}"
    lines = [
        f"{given.program}: {result.steps} steps in each of {number_of(rounds, 'round')}; 1.00 is the unchanged "
        f"program, with {spread} samples a second",
        "",
    ]
    measured = [each for each in result.cures if each.judgement]
    width = max((len(each.name) for each in result.cures), default=0)
    for each in sorted(measured, key=lambda each: -each.judgement.ratio if each.judgement else 0):
        found = each.judgement
        assert found is not None
        count = len(each.samples_per_s)
        lines.append(
            f"  {each.name:<{width}}  {found.ratio:5.2f}  ({found.low:.2f} to {found.high:.2f}"
            f"{'' if count == rounds else ', ' + number_of(count, 'round')}){'  helps' if found.helps else ''}"
        )
    lines += [f"  {each.name:<{width}}  failed: {each.failed}" for each in result.cures if each.failed]
    for why, several in groupby((each for each in result.cures if each.why_not), key=lambda each: each.why_not):
        lines.append(f"  {', '.join(each.name for each in several):<{width}}  not tried: {why}")
    lines.append("")
    if helpful := result.helpful():
        lines.append("Write one of these, the best first; then measure again, because two together may help no more:")
        for each in helpful:
            lines.append(f"  {each.write}{f'   {each.note}' if each.note else ''}")
    elif given.rounds < 2:
        lines.append("With one round the spread is unknown, so nothing is recommended. Write --rounds 3.")
    else:
        lines.append(
            f"Nothing helped: in a round, each change was below {max(LEAST_GAIN, max(speeds) / min(speeds)):.2f}."
        )
    return lines


def _as_json(given: argparse.Namespace, result: Result) -> dict[str, object]:
    return {
        "schema": SCHEMA, "program": given.program, "arguments": given.arguments,
        "rounds": len(result.samples_per_s), **dataclasses.asdict(result),
        "write": [each.write for each in result.helpful()], "torch": installed_torch(),
        "drivetrain": drivetrain.__version__,
    }  # fmt: skip
