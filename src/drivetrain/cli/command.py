"""The command ``drivetrain``, with one subcommand per entry of :data:`COMMANDS`.

To add a subcommand, write a module, and add the module to :data:`COMMANDS`. The module needs two functions.
``parser(prog)`` returns an ``argparse.ArgumentParser`` for help and completion. ``main(arguments, prog)`` returns the
exit code. The code is 0, 1 if a check failed, or 2 if the usage is wrong or a check could not run. Importing the module
and calling ``parser`` must not import torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import drivetrain
from drivetrain.errors import did_you_mean


class Command(NamedTuple):
    """One subcommand.

    Attributes:
        module: the name of the subcommand's module in this package.
        help: one line for ``drivetrain --help``.
        group: the heading above ``help``.
    """

    module: str
    help: str
    group: str = "more"

    def load(self) -> Any:
        """Import the module."""
        return importlib.import_module(f"drivetrain.{self.module}")


_TRAIN, _RUNS, _PARTS = "train", "look at a run and what it has left", "check this machine and parts of your own"
_LIGHTNING, _SHELL = "come from Lightning", "set up your shell"
COMMANDS: dict[str, Command] = {
    "new": Command("cli.new", "write a small project that trains", _TRAIN),
    "fit": Command("cli.fit", "train a model of a file or a configuration", _TRAIN),
    "validate": Command("cli.fit", "one pass over the validation data", _TRAIN),
    "test": Command("cli.fit", "one pass over the test data", _TRAIN),
    "predict": Command("cli.fit", "the model's outputs for the prediction data", _TRAIN),
    "run": Command("cli.run", "run a program with a loop of its own on hardware chosen here", _TRAIN),
    "plan": Command("forecast.command", "tell what a run will need, without its hardware", _TRAIN),
    "recipe": Command("cli.recipe", "print the file that submits a program to a cluster", _TRAIN),
    "report": Command("report.command", "write a page on a run, or on what differs between two", _RUNS),
    "advise": Command("trials.command", "try what may make a program faster, and print what does", _RUNS),
    "checkpoint": Command("cli.checkpoint_command", "inspect, verify, compare, convert, prune checkpoints", _RUNS),
    "goodput": Command("cli.goodput", "show where the wall time of a training went, over its restarts", _RUNS),
    "stacks": Command("cli.stacks", "show where the ranks of a running job are and wait", _RUNS),
    "prove-resume": Command("proof.command", "kill a program, start it again, and compare every step", _RUNS),
    "diff": Command("proof.diff_command", "find the first step in which two recorded runs differ", _RUNS),
    "doctor": Command("doctor.command", "check this machine and its torch, and what to write about it", _PARTS),
    "devices": Command("cli.devices", "list the hardware that can be used here", _PARTS),
    "conformance": Command("cli.conformance", "check a part of your own against the contract of its kind", _PARTS),
    "explain": Command("cli.explain", "explain a message that ends with a code such as [DT1042]", _PARTS),
    "exec": Command("compat.command", "run a program that was written for Lightning", _LIGHTNING),
    "migrate": Command("legacy.migrate.command", "rewrite programs that were written for Lightning", _LIGHTNING),
    "completion": Command("cli.completion", "print the completion for bash, zsh or fish", _SHELL),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``arguments`` begins with. This is the console script ``drivetrain``.

    Args:
        arguments: the words after "drivetrain" on the command line; ``None``: ``sys.argv[1:]``.

    Returns:
        The process's exit code. Without arguments, print the help and return 2. As with argparse, wrong usage raises
        ``SystemExit(2)``, and ``--help`` raises ``SystemExit(0)``.
    """
    made = parser()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        made.print_help(sys.stderr)
        return 2
    given = made.parse_args(words)
    if given.command not in COMMANDS:
        made.error(f"there is no command {given.command!r}. {did_you_mean(given.command, COMMANDS)}")
    module = COMMANDS[given.command].load()
    try:
        code: int = module.main(given.arguments, f"drivetrain {given.command}")
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except BrokenPipeError:  # the pipe may be the standard output, or another one that the program uses
        try:
            print(flush=True)
        # A reader such as head has ended. Without dup2, Python would report this again at exit.
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141  # 128 + SIGPIPE, as in a shell
        raise
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser for the options before the subcommand, and for the subcommand's name."""
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
    return COMMANDS[name].load().parser(f"drivetrain {name}")


if __name__ == "__main__":
    sys.exit(main())
