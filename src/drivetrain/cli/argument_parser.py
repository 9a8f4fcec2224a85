"""An argument parser with an option for each argument of a class."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from pathlib import PurePath
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

try:
    import jsonargparse
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "The command line of a program needs the package jsonargparse, which is not installed. "
        'Run `pip install "jsonargparse[signatures]"`.',
        name=error.name,
    ) from error
if tuple(map(int, jsonargparse.__version__.split(".")[:2])) < (4, 53):
    raise ImportError(
        f"The command line of a program needs jsonargparse 4.53 or later, and version {jsonargparse.__version__} is "
        'installed. Run `pip install --upgrade "jsonargparse[signatures]>=4.53"`.',
        name="jsonargparse",
    )

from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader, set_parsing_settings
from jsonargparse.typing import class_from_function

from drivetrain import callbacks, loggers
from drivetrain.base import files, remote
from drivetrain.base.packages import yaml
from drivetrain.callback import Callback
from drivetrain.cli import class_files
from drivetrain.cli.class_paths import Recipe, ReduceLROnPlateau
from drivetrain.cli.hints import with_hint
from drivetrain.errors import ConfigurationError, described, did_you_mean, shown
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.module import LightningModule
from drivetrain.settings import DOCS
from drivetrain.trainer.trainer import Trainer

AUTOMATIC = "AUTOMATIC"
"""The default of ``link_to`` in :meth:`LightningArgumentParser.add_optimizer_args` and ``add_lr_scheduler_args``: the
model's ``configure_optimizers`` returns the added optimizer or scheduler.
"""


_MODE = "yaml with file.py:Class"
# the working directory at the start of a parse; "" before and after a parse
_working_directory: ContextVar[str] = ContextVar("_working_directory", default="")


def _loaded(text: str) -> Any:
    """Read YAML. During a parse, also import each class that the YAML names as ``file.py:Class``."""
    value, folder = get_loader("yaml")(text), _working_directory.get()
    return class_files.import_paths(value, folder) if folder else value


set_loader(_MODE, _loaded, (yaml.YAMLError,))


class LightningArgumentParser(ArgumentParser):
    """A parser with an option ``--<key>.<argument>`` for each argument of a class.

    Options cannot be abbreviated. The error about an unknown option suggests a similar one.

    Args:
        args, kwargs: arguments of ``jsonargparse.ArgumentParser``. With ``default_env=True``, environment variables can
            also set options: ``PL_FIT__TRAINER__MAX_EPOCHS`` sets ``fit --trainer.max_epochs``.

    Attributes:
        callback_keys: the ``nested_key`` of each callback that :meth:`add_lightning_class_args` has added.
        files: for each ``file.py:Class`` on the command line or in a configuration file, the module's name and the
            file's path. Spawned ranks import these modules, too.
        optimizers, lr_schedulers: for each ``nested_key``, the allowed classes and ``link_to``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"env_prefix": "PL", "allow_abbrev": False, "parser_mode": _MODE, **kwargs})
        self.callback_keys: list[str] = []
        self.files: dict[str, str] = {}
        self.optimizers: dict[str, tuple[type | tuple[type, ...], str]] = {}
        self.lr_schedulers: dict[str, tuple[type | tuple[type, ...], str]] = {}

    def add_lightning_class_args(
        self,
        lightning_class: type | Callable[..., Any],
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add an option ``--<nested_key>.<argument>`` for each argument of a Trainer, module, data module or callback.

        The Trainer always gets a callback that is added here. The command line can set its arguments, but not remove
        it.

        Args:
            lightning_class: the class, or a function with a return annotation.
            nested_key: the word before the dot.
            subclass_mode: whether the command line can name a subclass by its class path.
            required: with ``subclass_mode``, whether the command line must name a class.

        Returns:
            The names of the added options, without dashes. With ``subclass_mode`` the list is empty, because the
            command line chooses the class.

        Raises:
            ConfigurationError: ``lightning_class`` is no Trainer, module, data module or callback.
        """
        kinds = (Trainer, LightningModule, LightningDataModule, Callback)
        cls = class_of(lightning_class) if callable(lightning_class) else object
        if not issubclass(cls, kinds):
            raise ConfigurationError(
                f"add_lightning_class_args got {described(lightning_class)}, which is none of "
                f"{', '.join(kind.__name__ for kind in kinds)}. Write add_class_arguments for other classes."
            )
        if issubclass(cls, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(cls, nested_key, fail_untyped=False, required=required)
            return []
        if issubclass(cls, Trainer):
            return self._add_trainer(cls, nested_key)
        # With fail_untyped=False, an argument without type and default becomes optional, with the default None.
        return self.add_class_arguments(cls, nested_key, fail_untyped=False, sub_configs=True)

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add an optimizer: ``--<nested_key>=SGD --<nested_key>.lr=0.1``.

        Args:
            optimizer_class: the optimizer, or a tuple of base classes whose subclasses are allowed.
            nested_key: the word before the dot.
            link_to: an option of the model, such as "model.optimizer_init". The model then gets a dictionary for
                :func:`~drivetrain.cli.instantiate_class`, which creates the optimizer. By default, the model's
                ``configure_optimizers`` returns the optimizer.
        """
        self._add_described(optimizer_class, nested_key, skip="params", title="The optimizer")
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: type[LRScheduler] | tuple[type[LRScheduler], ...] = (LRScheduler, ReduceLROnPlateau),
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add a learning-rate scheduler, with the arguments of :meth:`add_optimizer_args`."""
        self._add_described(lr_scheduler_class, nested_key, skip="optimizer", title="The learning-rate scheduler")
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def link_described(self) -> None:
        """Set each option in ``link_to`` from its optimizer or scheduler. Call this method after all options were
        added.
        """
        for key, (offered, link_to) in {**self.optimizers, **self.lr_schedulers}.items():
            if link_to != AUTOMATIC:
                self.link_arguments(key, link_to, compute_fn=functools.partial(_described, offered))

    def set_trainer_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Set new defaults for the Trainer's arguments. Objects that YAML cannot represent are ignored here.

        Raises:
            ConfigurationError: the Trainer has no argument of this name.
        """
        options = (action.dest for action in self._actions if action.dest.startswith("trainer."))
        known = {option.removeprefix("trainer.") for option in options if option.count(".") == 1}
        for name, value in defaults.items():
            if name not in known:
                raise ConfigurationError(
                    f"LightningCLI(trainer_defaults={{{name!r}: {shown(value)}}}): the Trainer has no such argument. "
                    f"{did_you_mean(name, known)}"
                )
            if is_plain(value):
                self.set_defaults({f"trainer.{name}": value})
            elif name == "callbacks" and (plain := [item for item in listed(value) if is_plain(item)]):
                self.set_defaults({f"trainer.{name}": plain})

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Parse a command line. The command line and the files of ``--config`` can name a class as ``file.py:Class``.

        ``--config`` also accepts an address such as ``s3://bucket/config.yaml``.

        Raises:
            ConfigurationError: the package for such an address, for example s3fs, is not installed.
        """
        words = [str(word) for word in (sys.argv[1:] if args is None else args)]
        options = ["", *words]
        for option, word in zip(options, words, strict=False):
            address = word.removeprefix("--config=")
            if files.is_remote(address) and (address != word or option in ("--config", "-c")):
                remote.check(address)
                set_parsing_settings(config_read_mode_fsspec_enabled=True)
        token = _working_directory.set(_working_directory.get() or os.getcwd())  # jsonargparse changes os.getcwd()
        try:
            return super().parse_args(list(map(class_files.import_path, words)), *rest, **kwargs)
        except ConfigurationError as error:  # the file or the class of a ``file.py:Class`` does not exist
            self.error(str(error), error)
        finally:
            self.files.update(class_files.imported)
            _working_directory.reset(token)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Return a configuration as text. It names a class as ``file.py:Class`` if the user did.

        With ``format="yaml"`` it names every class by its import path.
        """
        text: str = super().dump(*args, **kwargs)
        return text if kwargs.get("format") == "yaml" else class_files.places(text, self.files)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with code 2. If the parser was created with ``exit_on_error=False``, raise an exception instead."""
        super().error(with_hint(message, self), ex)

    def _add_trainer(self, cls: type[Trainer], key: str) -> list[str]:
        _import_public_names()
        names: list[str] = self.add_class_arguments(cls, key, instantiate=False, fail_untyped=False, sub_configs=True)
        docs = {f"{key}.{name}": doc for name, doc in DOCS.items()}
        for action in self._actions:
            if action.dest in docs and action.help != argparse.SUPPRESS:
                action.help = docs[action.dest].replace("%", "%%")
        return names

    def _add_described(self, offered: type | tuple[type, ...], key: str, skip: str, title: str) -> None:
        """Add the arguments of a class, except ``skip``. The parser creates no object of the class: ``skip``, such as
        an optimizer's parameters, has no value yet.
        """
        if isinstance(offered, tuple):
            group = self.add_argument_group(title, name=key)
            group.add_subclass_arguments(
                offered, key, as_group=False, skip={skip}, instantiate=False, fail_untyped=False
            )
        else:
            self.add_class_arguments(offered, key, skip={skip}, instantiate=False, fail_untyped=False, sub_configs=True)


def class_of(given: type | Callable[..., Any]) -> type:
    """Return the class ``given``; for a function, a class that calls the function to create objects."""
    return given if isinstance(given, type) else class_from_function(given)


def listed(value: Any) -> list[Any]:
    """Return a list of one object or of an iterable's objects; for ``None``, an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping, Namespace)) else [value]


def is_plain(value: Any) -> bool:
    """Whether YAML can represent ``value``: plain data, or a result of ``jsonargparse.lazy_instance``."""
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    data = (str, int, float, timedelta, PurePath, Namespace)
    return value is None or isinstance(value, data) or hasattr(value, "lazy_get_init_args")


def _described(offered: type | tuple[type, ...], value: Namespace | None) -> dict[str, Any] | None:
    return None if value is None else Recipe(offered, value).described()


def _import_public_names() -> None:
    """Import all callbacks and loggers, so that the parser knows their bare names
    (``--trainer.callbacks+=EarlyStopping``).
    """
    for folder in (callbacks, loggers):
        for name in folder.__all__:
            getattr(folder, name)
