"""The command ``drivetrain``: one subcommand per entry of :data:`COMMANDS`, imported when it is called.

To add a subcommand, add a line to :data:`COMMANDS`, and to its module two functions: ``parser(prog)``, which returns
the ``argparse.ArgumentParser`` of help and completion, and ``main(arguments, prog)``, which returns the exit code: 0;
1 if what was checked is not right; 2 for wrong usage, or what could not be tried. For help nothing may import torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import drivetrain
from drivetrain.errors import did_you_mean


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        function: the location of its ``main``, as ``"module:main"``; it is called with ``(arguments, prog)``.
        help: one line for ``drivetrain --help``.
        group: the heading of that line.
    """

    function: str
    help: str
    group: str = "more"


_TRAIN, _RUNS, _PARTS = "train", "look at a run and what it has left", "check this machine and parts of your own"
_LIGHTNING, _SHELL = "come from Lightning", "set up your shell"
COMMANDS: dict[str, Command] = {
    "new": Command("drivetrain.cli.new:main", "write a small project that trains", _TRAIN),
    "fit": Command("drivetrain.cli.fit:main", "train a model of a file or a configuration", _TRAIN),
    "validate": Command("drivetrain.cli.fit:main", "one pass over the validation data", _TRAIN),
    "test": Command("drivetrain.cli.fit:main", "one pass over the test data", _TRAIN),
    "predict": Command("drivetrain.cli.fit:main", "the model's outputs for the prediction data", _TRAIN),
    "run": Command("drivetrain.cli.run:main", "run a program with a loop of its own on hardware chosen here", _TRAIN),
    "plan": Command("drivetrain.forecast.command:main", "tell what a run will need, without its hardware", _TRAIN),
    "recipe": Command("drivetrain.cli.recipe:main", "print the file that submits a program to a cluster", _TRAIN),
    "report": Command("drivetrain.report.command:main", "write a page on a run, or on what differs between two", _RUNS),
    "advise": Command(
        "drivetrain.trials.command:main", "try what may make a program faster, and print what does", _RUNS
    ),
    "checkpoint": Command(
        "drivetrain.cli.checkpoint_command:main", "inspect, verify, compare, convert, prune checkpoints", _RUNS
    ),
    "goodput": Command(
        "drivetrain.cli.goodput:main", "show where the wall time of a training went, over its restarts", _RUNS
    ),
    "stacks": Command("drivetrain.cli.stacks:main", "show where the ranks of a running job are and wait", _RUNS),
    "prove-resume": Command(
        "drivetrain.proof.command:main", "kill a program, start it again, and compare every step", _RUNS
    ),
    "diff": Command(
        "drivetrain.proof.diff_command:main", "find the first step in which two recorded runs differ", _RUNS
    ),
    "doctor": Command(
        "drivetrain.doctor.command:main", "check this machine and its torch, and what to write about it", _PARTS
    ),
    "devices": Command("drivetrain.cli.devices:main", "list the hardware that can be used here", _PARTS),
    "conformance": Command(
        "drivetrain.cli.conformance:main", "check a part of your own against the contract of its kind", _PARTS
    ),
    "explain": Command(
        "drivetrain.cli.explain:main", "explain a message that ends with a code such as [DT1042]", _PARTS
    ),
    "exec": Command("drivetrain.compat.command:main", "run a program that was written for Lightning", _LIGHTNING),
    "migrate": Command(
        "drivetrain.legacy.migrate.command:main", "rewrite programs that were written for Lightning", _LIGHTNING
    ),
    "completion": Command("drivetrain.cli.completion:main", "print the completion for bash, zsh or fish", _SHELL),
}


def load(path: str) -> Any:
    """Return the object at ``"module:name"``; the function of this name in base/registry.py imports much more."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Console script: find the subcommand and call it.

    Args:
        arguments: the words after "drivetrain" on the command line; ``None``: ``sys.argv[1:]``.

    Returns:
        The process's exit code. Without arguments it is 2, and the help is printed. Wrong usage ends in
        ``SystemExit(2)``, ``--help`` in ``SystemExit(0)``, as with argparse.
    """
    made = parser()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        made.print_help(sys.stderr)
        return 2
    given = made.parse_args(words)
    if given.command not in COMMANDS:
        made.error(f"there is no command {given.command!r}. {did_you_mean(given.command, COMMANDS)}")
    function: Callable[[Sequence[str], str], int] = load(COMMANDS[given.command].function)
    try:
        code = function(given.arguments, f"drivetrain {given.command}")
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except BrokenPipeError:  # of the standard output, or of something else in a program
        try:
            print(flush=True)
        except BrokenPipeError:  # its reader, such as head, has ended; Python would report that at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141  # as a shell has it for SIGPIPE
        raise
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of what precedes a subcommand's own words."""
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    listed = "\n\n".join(
        f"{group}:\n" + "\n".join(f"  {name:<14}{each.help}" for name, each in COMMANDS.items() if each.group == group)
        for group in groups
    )
    made = argparse.ArgumentParser(
        "drivetrain", "%(prog)s COMMAND ...", "Train PyTorch models; inspect, check and compare their runs.",
        f"{listed}\n\ndrivetrain COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--version", action="version", version=f"drivetrain {drivetrain.__version__}")
    made.add_argument("command", metavar="COMMAND", help="one of those below")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    return made


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand."""
    made: argparse.ArgumentParser = load(COMMANDS[name].function.replace(":main", ":parser"))(f"drivetrain {name}")
    return made


if __name__ == "__main__":
    sys.exit(main())
