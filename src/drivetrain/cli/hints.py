"""Adds suggestions to a parser's error messages, such as the option that the user probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.accelerators import Accelerator
from drivetrain.callback import Callback
from drivetrain.errors import UnknownArgumentError, closest
from drivetrain.loggers.logger import Logger
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.module import LightningModule
from drivetrain.settings import complete
from drivetrain.strategies import Strategy

_NAMEABLE = (
    LightningModule, LightningDataModule, Callback, Logger, Strategy, Accelerator, Optimizer, LRScheduler,
)  # fmt: skip
"""A configuration can name subclasses of these classes without their module."""

_CHOICE = re.compile(r"invalid choice: '(\S+?)'")
_CLASS_NAME = re.compile(r"Expected a dot import path string: (\w+)\s")
_OF_LIGHTNING = re.compile(r"given class_path '((?:lightning|pytorch_lightning)\.[\w.]+)'.*\n *No module named '")
_OPTION = re.compile(r"(?:^Group '([\w.]+)' does not accept option|does not accept option|^Option) '([\w.]+)'")


_MEANT_BY = {
    "fit": ("train", "training", "run"),
    "validate": ("eval", "evaluate", "val", "valid"),
    "predict": ("infer", "inference"),
}
"""Words that users write instead of a subcommand, such as "train" for "fit"."""


def with_hint(message: str, parser: argparse.ArgumentParser) -> str:
    """Return the ``message`` of ``parser``, followed by suggestions."""
    hints = list(dict.fromkeys(_hints(message, parser)))
    return "\n".join([message, *hints])


def _hints(message: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    if found := _CHOICE.search(message):
        subcommands = _subcommands(parser)
        if close := closest(found[1], subcommands) or next(
            (each for each, words in _MEANT_BY.items() if found[1] in words and each in subcommands), None
        ):
            yield f"Did you mean {close!r}?"
        elif subcommands:  # the word may belong to an option that stands before the subcommand
            yield _first_the_subcommand(next(iter(subcommands)), "--trainer.max_epochs=3")
    elif found := _CLASS_NAME.search(message):
        if close := closest(found[1], {cls.__name__ for base in _NAMEABLE for cls in _subclasses(base)}):
            yield f"Did you mean {close!r}?"
    else:
        known = set(_options(parser))
        for word in message.partition("unrecognized arguments: ")[2].split():
            if word.startswith("--"):
                name = word.partition("=")[0].strip("-+")
                if name not in known:
                    yield from _for_option(name, known, dashes="--")
                elif owner := next((sub for sub, its in _subcommands(parser).items() if name in _options(its)), None):
                    yield _first_the_subcommand(owner, word)
        for path in _OF_LIGHTNING.findall(message):
            name = path.rpartition(".")[2]
            yield f"{path!r} is a path of Lightning's. Write the name of the class alone, {name!r}, in a file too."
        # messages about an option in a file, or about an argument of a class
        for group, name in _OPTION.findall(message):
            yield from _for_option(f"{group}.{name}" if group else name, known, dashes="")


def _first_the_subcommand(name: str, option: str) -> str:
    return f"Options come after the subcommand. Write `{name}` first: {name} {option}"


def _for_option(name: str, known: set[str], dashes: str) -> Iterator[str]:
    """Yield suggestions for an option. Compare only options of the same group. A common prefix such as "trainer." would
    make all its options similar.
    """
    parent, dot, leaf = name.rpartition(".")
    sisters = {option.rpartition(".")[2] for option in known if option.rpartition(".")[0] == parent}
    longer = [sister for sister in sorted(sisters) if sister.startswith(leaf)]  # it was abbreviated
    if close := longer[0] if longer else closest(leaf, sisters):
        yield f"Did you mean {dashes}{parent}{dot}{close}?"
    elif not sisters and (close := closest(name, known)):
        yield f"Did you mean {dashes}{close}?"
    elif not dot and (owned := [option for option in sorted(known) if option.rpartition(".")[2] == leaf]):
        yield f"Did you mean {' or '.join(dashes + option for option in owned)}?"  # --max_epochs, --lr
    elif parent == "trainer":
        try:
            complete({leaf: "..."}, {})  # its error message has advice about former arguments of the Trainer
        except UnknownArgumentError as error:
            yield str(error)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for subparser in _subcommands(parser).values():
        yield from _options(subparser)
    for action in parser._actions:
        if action.option_strings and action.dest != argparse.SUPPRESS and not action.dest.endswith(".help"):
            yield action.dest


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: subparser
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, subparser in action.choices.items()
    }


def _subclasses(cls: type) -> Iterator[type]:
    direct: list[type] = type.__subclasses__(cls)
    for subclass in direct:
        yield subclass
        yield from _subclasses(subclass)
