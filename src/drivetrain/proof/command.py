"""The command ``drivetrain prove-resume``: kill a training program, start it again, and compare every step."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drivetrain.cli.program import add_program_arguments, command_of, program_parser, say
from drivetrain.proof.proving import Verdict, prove
from drivetrain.proof.runs import NEWEST, RUN, Program, signals_as_interrupts


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = program_parser(
        prog,
        "Run a training program undisturbed, then again with kills at random optimizer steps, each followed by a "
        "restart with the same command; compare every step. It works for any program with optimizers of torch.optim.",
    )
    made.add_argument("--kills", type=int, default=5, help="how many kills (default: 5); 0: only record the run")
    made.add_argument("--ranks", type=int, default=0, help="start the program as this many ranks of torchrun")
    made.add_argument("--seed", type=int, default=0, help="seed of the random steps at which to kill (default: 0)")
    made.add_argument(
        "--resume-args", type=shlex.split, default=[], metavar="WORDS",
        help='arguments that a restart gets in addition, such as --resume-args "--resume {newest:step_*}": the newest '
        "file or folder with such a name; without any, the restart gets none of these arguments",
    )  # fmt: skip
    made.add_argument("--link", action="append", default=[], metavar="NAME",
                        help="a file or folder that the program only reads; each run gets a link to it")  # fmt: skip
    made.add_argument("--timeout", type=float, default=3600.0, help="seconds for the undisturbed run (default: 3600)")
    made.add_argument("--folder", type=Path, help="keep the runs and their records in this new folder")
    made.add_argument("--json", action="store_true", help="print the verdict as JSON")
    made.add_argument("--why", action="store_true",
                        help="repeat the step that differs, and name the first operation that differs")  # fmt: skip
    made.epilog = (
        "Both runs start in a copy of the working directory, so that neither sees the files of the other. "
        f"{RUN} in an argument of the program is replaced by the path of the copy."
    )
    add_program_arguments(made)
    return made


def main(arguments: Sequence[str] | None = None, prog: str = "drivetrain prove-resume") -> int:
    """Prove that the program in ``arguments`` resumes exactly.

    Args:
        arguments: the words after the command's name; ``None``: ``sys.argv[1:]``.
        prog: the command's name in messages.

    Returns:
        0: the program resumes exactly. 1: the program does not. 2: the proof could not be run. 130: interrupted.
    """
    made = parser(prog)
    given = made.parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    if wrong := _wrong(given):
        made.error(wrong)
    command = command_of(given, made, in_copy=RUN in given.program)
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="drivetrain-proof-"))).absolute()
    program = Program(command, given.resume_args, given.ranks, links=given.link)
    verdict = Verdict(2)
    try:
        with signals_as_interrupts():  # the program is ended, and the folder removed, even after SIGTERM and SIGHUP
            verdict = prove(program, folder, given.kills, given.seed, given.timeout, say, given.why)
    except KeyboardInterrupt:
        say(f"{prog}: interrupted, the program was ended")
        return 128 + signal.SIGINT
    finally:
        if given.folder is None and verdict.code != 1:
            shutil.rmtree(folder, ignore_errors=True)
    if verdict.code == 1 and given.folder is None:
        verdict.message += f"\nThe runs and their records are in {folder}"
    print(json.dumps(dataclasses.asdict(verdict), indent=2) if given.json else verdict.message)
    return verdict.code


def _joined(words: Sequence[str]) -> list[str]:
    """Join --resume-args and the following word by "=". Otherwise argparse would read a word such as ``--resume`` as an
    option.
    """
    found = list(words)
    if "--resume-args" in found[:-1]:
        place = found.index("--resume-args")
        found[place : place + 2] = [f"--resume-args={found[place + 1]}"]
    return found


def _wrong(given: argparse.Namespace) -> str | None:
    """Return a description of the first invalid option, or ``None`` if all options are valid."""
    if given.kills < 0:
        return f"--kills must be at least 0, not {given.kills}"
    if given.ranks < 0:
        return f"--ranks must be at least 0, not {given.ranks}"
    if given.folder is not None and given.folder.exists():
        return f"--folder {given.folder} exists already; name a new one, or remove it"
    for name in given.link:
        if Path(name).is_absolute() or not Path(name).exists():
            return f"--link {name} must be a file or folder, written relative to the working directory {Path.cwd()}"
    for word in given.resume_args:
        for _, pattern in NEWEST.findall(word):
            if pattern.startswith(("/", "{")):
                return f"--resume-args: {{newest:{pattern}}} must be relative, such as {{newest:out/*.pt}}"
    return None
