"""The commands ``drivetrain fit``, ``validate``, ``test`` and ``predict``. They run :class:`LightningCLI` with classes
that the command line names.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

from drivetrain.base import files
from drivetrain.base.lazy import on_first_use
from drivetrain.base.packages import yaml
from drivetrain.cli import class_files
from drivetrain.cli.program import say
from drivetrain.errors import ConfigurationError, check_installed, described, did_you_mean, shown, whose
from drivetrain.settings import DOCS, complete

with on_first_use:
    from drivetrain.cli import class_paths, lightning_cli, save_config
    from drivetrain.module import datamodule, module
    from drivetrain.trainer import trainer

_OPTIONS = ("config", "trainer", "model", "data", "seed_everything", "optimizer", "lr_scheduler")
"""The options that all four commands have."""

ABOUT = {
    "fit": "train the model",
    "validate": "one pass over the validation data",
    "test": "one pass over the test data",
    "predict": "the model's outputs for the prediction data",
}


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser for the short help and for completion. LightningCLI parses the options of the user's
    classes.
    """
    name = prog.rpartition(" ")[2]
    made = argparse.ArgumentParser(
        prog,
        "%(prog)s FILE.py:CLASS [--data FILE.py:CLASS] [OPTION ...]\n       %(prog)s CONFIG.yaml [OPTION ...]",
        f"{ABOUT[name].capitalize()}. CLASS is a LightningModule; without --data it has the loaders.",
        epilog=f"Every argument of the Trainer is an option --trainer.NAME, of the model --model.NAME, of the data "
        f"--data.NAME. They are listed by: {prog} FILE.py:CLASS --help",
        allow_abbrev=False,
    )
    made.add_argument("target", metavar="TARGET", help="a class, such as train.py:Net or package.Net, or a YAML file")
    made.add_argument("--data", metavar="FILE.py:CLASS", help="the LightningDataModule")
    made.add_argument("-c", "--config", metavar="FILE", help="a YAML file with options; what follows it wins")
    made.add_argument("--print_config", action="store_true", help="print such a file with every option, and exit")
    made.add_argument("--ckpt_path", metavar="PATH", help="the checkpoint to resume from, or whose weights to use")
    made.add_argument("--seed_everything", metavar="SEED", help="a number; true: PL_GLOBAL_SEED or 0; false: no seed")
    for option in ("optimizer", "lr_scheduler"):
        made.add_argument(f"--{option}", metavar="CLASS", help="for a model without configure_optimizers")
    for option in DOCS:
        made.add_argument(f"--trainer.{option}", help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str], prog: str) -> int:
    """Call ``trainer.fit`` if ``prog`` is "drivetrain fit", and so on.

    Returns:
        0. Exceptions of the training are not caught. Wrong usage raises ``SystemExit(2)``.
    """
    name, short, words = prog.rpartition(" ")[2], parser(prog), list(arguments)
    if not words or words[0] in ("-h", "--help"):
        short.parse_args(words)
    sys.path.insert(0, os.getcwd())  # a configuration can name modules in the working directory
    try:
        check_installed(prog, "jsonargparse", install='"drivetrain[cli]"')
        if not words[0].startswith("-"):
            words[:1] = _target(words[0])
        for path in [*_given(words, "--config"), *_given(words, "-c")]:
            _check(path, name)
        model = _class(words, "--model", module.LightningModule)
        data = _class(words, "--data", datamodule.LightningDataModule)
    except ConfigurationError as error:
        short.error(str(error))

    class OneCommand(lightning_cli.LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {name: lightning_cli.LightningCLI.subcommands()[name]}

        def predict(self, **given: Any) -> None:
            """Predict, and save the predictions beside the logs."""
            found, folder = self.trainer.predict(**given), self.trainer.log_dir or self.trainer.default_root_dir
            if found and self.trainer.is_global_zero:
                import torch  # here, because the command's help should not import torch

                os.makedirs(folder, exist_ok=True)
                torch.save(found, path := os.path.join(folder, "predictions.pt"))
                say(f"Predictions: {path}, a list with the output of each batch. Read it with torch.load(path).")

    options: dict[str, Any] = {
        "parser_kwargs": {"prog": prog.rpartition(" ")[0]}, "save_config_callback": save_config.SaveBesideLog,
        "args": [name, *words],
    }  # fmt: skip
    if {"-h", "--help"} & {*words}:  # show the options of the user's classes, too
        options.update(model_class=model, datamodule_class=data, args=[name, "--help"])
    OneCommand(**options)
    return 0


def _target(word: str) -> list[str]:
    """Return the option for the first word of the command line: ``--config`` for a file, ``--model`` for a class.

    Raises:
        ConfigurationError: the word is neither a file nor a class.
    """
    if word.endswith((".yaml", ".yml", ".json")):
        if "://" not in word and not os.path.isfile(word):
            raise ConfigurationError(f"There is no file {word}. Write the path of a configuration.")
        return ["--config", word]
    if word.endswith(".py"):
        found = class_files.module_of(word)
        names = [key for key, value in vars(found).items() if _is(value, module.LightningModule)]
        names = [key for key in names if vars(found)[key].__module__ == found.__name__] or ["Net"]
        raise ConfigurationError(f"{word} names no class. Write {' or '.join(f'{word}:{name}' for name in names)}.")
    if "." not in word:
        raise ConfigurationError(
            f"{word!r} is neither a class in a file nor a configuration. Write train.py:Net or config.yaml."
        )
    return ["--model", word]


def _given(words: Sequence[str], option: str) -> list[str]:
    """Return the values of ``option`` on the command line."""
    pairs = zip(["", *words], words, strict=False)
    joined = f"{option}="
    return [word.removeprefix(joined) for before, word in pairs if before == option or word.startswith(joined)]


def _check(path: str, name: str) -> None:
    """Check that a configuration file is YAML with known options and known arguments of the Trainer.

    Raises:
        ConfigurationError: the file is not YAML, or a name is unknown. For a missing file, the parser raises the error.
    """
    if not os.path.isfile(path):
        return
    text = files.read(path).decode(errors="replace")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        lines = [] if mark is None else text.splitlines()[mark.line : mark.line + 1]
        where = "".join(f", line {mark.line + 1}, {shown(line.strip())}" for line in lines)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigurationError(
            f"{path}{where}: this is not YAML: {problem}. Correct this line or the one before it: options are written "
            "as `name: value`, with equal spaces before options of the same group."
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{path} has {described(found)}, and a configuration has options by their names. Write `trainer:`, and "
            "in a line below it `  max_epochs: 3`."
        )
    method = inspect.signature(getattr(trainer.Trainer, name)).parameters.keys() - {"self"}
    options = {*_OPTIONS, *(method - lightning_cli.LightningCLI.subcommands()[name])}
    for key in found:
        if (first := str(key).partition(".")[0]) not in options:
            raise ConfigurationError(f"{path}: there is no option {first!r}. {did_you_mean(first, options)}")
    if isinstance(arguments := found.get("trainer"), dict):
        complete({str(key).partition(".")[0].rstrip("+"): value for key, value in arguments.items()}, {})


def _class(words: Sequence[str], option: str, kind: type) -> type | None:
    """Return the class that ``option`` names by its path. Return ``None`` without ``option``, and for a bare name or a
    file, which LightningCLI handles.

    Raises:
        ConfigurationError: the class does not exist, or is not a subclass of ``kind``.
    """
    for place in _given(words, option):
        if "." not in place or place.endswith((".yaml", ".yml", ".json")):
            continue
        found = class_files.object_at(place) if ".py:" in place else class_paths.class_at(place)
        if not _is(found, kind):
            name = kind.__name__
            cure = f"Write class {found.__name__}({name})." if _is(found, object) else f"Name a {name}."
            raise ConfigurationError(f"{place} is {described(found)}, and no {name}. {whose(found) or cure}")
        return found
    return None


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, type) and issubclass(value, kind)
