"""LightningCLI: a command line and configuration files that set the arguments of a program's classes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.seed import seed_everything
from drivetrain.cli.argument_parser import AUTOMATIC, LightningArgumentParser, class_of, is_plain, listed
from drivetrain.cli.class_paths import Recipe, ReduceLROnPlateau
from drivetrain.cli.fit import ABOUT
from drivetrain.cli.from_checkpoint import as_plain, hyperparameters, with_hyperparameters
from drivetrain.cli.save_config import SaveConfigCallback
from drivetrain.errors import ConfigurationError, arguments_checked
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.hparams import described_hyperparameters
from drivetrain.module.module import LightningModule
from drivetrain.settings import complete
from drivetrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    from jsonargparse import Namespace

_METHOD_HELP = {
    "ckpt_path": 'a checkpoint to resume from, or whose weights to use: its path, "best" or "last"',
    "weights_only": "null or true: read checkpoints as plain data; false: unpickle them, which can run any code",
    "verbose": "print the metrics",
    "return_predictions": "false: keep none of the outputs, for a callback that writes them",
}


class LightningCLI:
    """A program's command line: ``LightningCLI(Net, Data)`` adds the subcommands fit, validate, test and predict.

    Every argument of the Trainer, the model and the data module is an option: ``python train.py fit
    --trainer.max_epochs=3 --model.width=64 --config base.yaml``. ``--config`` may be repeated, and later values take
    precedence. The complete configuration is written to the run's folder.

    Override :meth:`add_arguments_to_parser` to add or link options. To run code before or after a subcommand, define
    methods such as ``before_fit`` and ``after_fit``. If a subclass defines ``fit(self, model, **kwargs)``, the
    subcommand ``fit`` calls it instead of ``trainer.fit``.

    Args:
        model_class: the model's class, or a function that returns the model. With ``None``, ``--model`` names a class.
        datamodule_class: the data module's class, or a function that returns it. With ``None``, ``--data`` can name a
            class.
        save_config_callback: the callback that saves the configuration, or ``None`` to not save it.
        save_config_kwargs: arguments of that callback, such as ``{"overwrite": True}``.
        trainer_class: the Trainer's class, a subclass, or a function that returns a Trainer.
        trainer_defaults: new defaults for the Trainer's arguments. Objects that YAML cannot represent are not in the
            saved configuration. Callbacks that YAML cannot represent are always added to those of the command line.
        seed_everything_default: the default of ``--seed_everything``: a seed, True to call ``seed_everything()``, or
            False.
        parser_kwargs: arguments of the parser. An entry "fit" has a dictionary of arguments for the parser of the
            subcommand ``fit``, and so on.
        parser_class: the parser, a subclass of :class:`LightningArgumentParser`.
        subclass_mode_model, subclass_mode_data: whether the command line can name a subclass of the given class.
        args: what to parse instead of ``sys.argv``: a list of words, or a dictionary or namespace of options.
        run: whether there are subcommands. If False, LightningCLI only creates the objects, and the program calls the
            Trainer.
        auto_configure_optimizers: whether to add the options ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: whether ``save_hyperparameters`` in the model or the data module saves the
            configuration. ``load_from_checkpoint`` can then create arguments that are objects.

    Attributes:
        parser: the parser of the complete command line.
        subcommand: the name of the running subcommand, or ``None`` with ``run=False``.
        config: the parsed configuration.
        config_init: the configuration, with the created objects in place of their descriptions.
        model, datamodule, trainer: the objects.

    Raises:
        SystemExit: the command line is wrong (code 2), or has ``--help`` or ``--print_config`` (code 0).
        ConfigurationError: the program's own code is wrong, or the Trainer refuses a value.
    """

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule | None
    parser: LightningArgumentParser
    config: Namespace

    @arguments_checked
    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: list[str] | tuple[str, ...] | dict[str, Any] | Namespace | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        for argument, given in (
            ("model_class", model_class), ("datamodule_class", datamodule_class), ("trainer_class", trainer_class)
        ):  # fmt: skip
            if isinstance(given, (LightningModule, LightningDataModule, Trainer)):
                name = type(given).__name__
                raise ConfigurationError(
                    f"LightningCLI({argument}=...) got an object of {name}, and LightningCLI makes the object itself, "
                    f"from the options of the command line. Pass the class: {argument}={name}."
                )
        self.model_class = model_class or LightningModule
        self.datamodule_class = datamodule_class or LightningDataModule
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support
        self.subcommand: str | None = None
        self._environment = complete({})
        self._subparsers: dict[str, LightningArgumentParser] = {}
        self._method_options: dict[str, list[str]] = {}

        own = {key: value for key, value in self.parser_kwargs.items() if key not in self.subcommands()}
        of_subcommands = {key: value for key, value in self.parser_kwargs.items() if key not in own}
        self.setup_parser(run, own, of_subcommands)
        self.parse_arguments(self.parser, args)
        self.subcommand = self.config["subcommand"] if run else None
        self._take_hyperparameters()
        self._seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # ---- to override ---------------------------------------------------------------------------------------------

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override this method to add options, to link options or to set defaults. Called for the parser of each
        subcommand.
        """

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the Trainer's methods that become subcommands. For each one, return the arguments that do not become
        options.
        """
        fit = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": fit} | {name: {"model", "dataloaders", "datamodule"} for name in ("validate", "test", "predict")}

    def before_instantiate_classes(self) -> None:
        """Called after parsing, before any object is created. This method may change ``self.config``."""

    def instantiate_classes(self) -> None:
        """Create the model, the data module and the Trainer."""
        self.config_init: Namespace = self.parser.instantiate(self.config, instantiators=self._instantiators())
        made = self._own(self.config_init)
        self.datamodule = made.get("data")
        self.model = made["model"]
        if self.auto_configure_optimizers:
            self._give_optimizers()
        self.trainer = self.instantiate_trainer()
        if self.subcommand is not None:  # without a subcommand, the program itself calls trainer.fit
            self.trainer._resumed_by = "the same command with --ckpt_path=last"

    def after_instantiate_classes(self) -> None:
        """Called after ``self.model``, ``self.datamodule`` and ``self.trainer`` were created, before the subcommand
        runs.
        """

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Return the configured Trainer, with its callbacks.

        Args:
            kwargs: arguments of the Trainer that override the configuration.
        """
        parser, made = self._parser(self.subcommand), self._own(self.config_init)
        arguments: dict[str, Any] = {**vars(made["trainer"])} if "trainer" in made else {}
        for name, value in self._objects_by_default().items():
            if name != "callbacks" and arguments.get(name) == parser.get_default(f"trainer.{name}"):
                arguments[name] = value
        arguments.update(kwargs)
        own = listed(self._objects_by_default().get("callbacks"))
        own += [made[key] for key in parser.callback_keys if made.get(key) is not None]
        if self.save_config_callback is not None and not arguments.get("fast_dev_run"):
            own.append(self.save_config_callback(parser, self._own(self.config), **self.save_config_kwargs))
        if "callbacks" in arguments:
            arguments["callbacks"] = [*listed(arguments["callbacks"]), *own]
        elif own:
            rank_zero_warn(
                f"{getattr(self.trainer_class, '__name__', self.trainer_class)} takes no callbacks, so these are left "
                f"out: {', '.join(type(callback).__name__ for callback in own)}. Let it take the argument `callbacks`."
            )
        return self.trainer_class(**arguments)

    @staticmethod
    def configure_optimizers(lightning_module: LightningModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Called in place of the model's ``configure_optimizers`` if ``--optimizer`` is given. Return a value that the
        Trainer accepts from ``configure_optimizers``.

        Args:
            lightning_module: the model.
            optimizer: the optimizer that ``--optimizer`` describes, with all parameters of the model.
            lr_scheduler: the scheduler that ``--lr_scheduler`` describes, if this option is given.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            lr_scheduler = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    # ---- parsers -------------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a new parser with the option ``--config``. ``kwargs`` are its arguments."""
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action="config", help="a YAML file with options; what follows it wins")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Create ``self.parser``, with all options.

        Args:
            add_subcommands: whether to add the subcommands, each with a parser.
            main_kwargs: arguments of the parser.
            subparser_kwargs: for each subcommand, the arguments of its parser.
        """
        self.parser = self.init_parser(**main_kwargs)
        if not add_subcommands:
            self._fill(self.parser)
            return
        trainer = class_of(self.trainer_class)
        added = self.parser.add_subcommands(dest="subcommand", required=True)
        for name, skip in self.subcommands().items():
            if not callable(method := getattr(trainer, name, None)):
                raise ConfigurationError(
                    f"subcommands() names {name!r}, and {trainer.__name__} has no such method. Define it there, or "
                    "leave the name out."
                )
            about = ABOUT.get(name) or (method.__doc__ or name).strip().splitlines()[0]
            subparser = self.init_parser(
                **{"usage": "%(prog)s", "description": about, **subparser_kwargs.get(name, {})}
            )
            self._fill(subparser)
            group = subparser.add_argument_group(f"Arguments of {name}")
            self._method_options[name] = group.add_method_arguments(trainer, name, as_group=False, skip={*skip})
            for action in subparser._actions:
                if action.dest in self._method_options[name]:
                    action.help = _METHOD_HELP.get(action.dest, action.help)
            self._subparsers[name] = subparser
            added.add_subcommand(name, subparser, help=about)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that do not depend on the program's classes."""
        parser.add_argument(
            "--seed_everything", type=bool | int, default=self.seed_everything_default,
            help="seed of all random generators; true: PL_GLOBAL_SEED or 0; false: leave them alone",
        )  # fmt: skip

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of the Trainer, of the model and of the data module as options."""
        options = parser.add_lightning_class_args(self.trainer_class, "trainer")
        # The Trainer reads environment variables for arguments that are not passed, but the parser passes all. So the
        # values in the environment become the parser's defaults.
        found = {name: value for name, value in self._environment.items() if f"trainer.{name}" in options}
        parser.set_trainer_defaults({**found, **self.trainer_defaults})
        parser.add_lightning_class_args(self.model_class, "model", self.subclass_mode_model)
        parser.add_lightning_class_args(self.datamodule_class, "data", self.subclass_mode_data, required=False)

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Set each option in ``link_to`` from its optimizer or scheduler."""
        parser.link_described()

    def parse_arguments(
        self, parser: LightningArgumentParser, args: list[str] | tuple[str, ...] | dict[str, Any] | Namespace | None
    ) -> None:
        """Parse ``args``, by default ``sys.argv``, and store the result in ``self.config``."""
        if args is None or isinstance(args, (list, tuple)):
            self.config = parser.parse_args(args)
        else:
            self.config = parser.parse_object(args)

    def _fill(self, parser: LightningArgumentParser) -> None:
        """Add all options to ``parser``, except those of ``trainer.fit`` and so on, such as ``--ckpt_path``."""
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args()
        self.link_optimizers_and_lr_schedulers(parser)

    def _objects_by_default(self) -> dict[str, Any]:
        """Return the objects in ``trainer_defaults`` that YAML cannot represent."""
        found = {name: value for name, value in self.trainer_defaults.items() if not is_plain(value)}
        if "callbacks" in found:
            found["callbacks"] = [item for item in listed(found["callbacks"]) if not is_plain(item)]
        return found

    @functools.cached_property
    def config_dump(self) -> dict[str, Any]:
        """The subcommand's part of ``self.config`` as plain data."""
        return as_plain(self._parser(self.subcommand), self._own(self.config))

    def _own(self, config: Namespace) -> Namespace:
        """Return the part of ``config`` that belongs to the subcommand."""
        return config if self.subcommand is None else config[self.subcommand]

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        """Return the parser of a subcommand. Programs written for Lightning call this private method."""
        return self.parser if subcommand is None else self._subparsers[subcommand]

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        """Return the value of ``key`` in the subcommand's part of ``config``. Programs written for Lightning call this
        private method.
        """
        return config.get(str(self.subcommand), config).get(key, default)

    # ---- the run -------------------------------------------------------------------------------------------------

    def _seed(self) -> None:
        config = self._own(self.config)
        if (seed := config["seed_everything"]) is not False:
            config["seed_everything"] = seed_everything(None if seed is True else seed, workers=True)

    def _give_optimizers(self) -> None:
        """Let the model's ``configure_optimizers`` create the optimizer and the scheduler of the command line."""
        parser, config = self._parser(self.subcommand), self._own(self.config_init)
        optimizer = self._recipe(parser.optimizers, config, "optimizer")
        scheduler = self._recipe(parser.lr_schedulers, config, "lr_scheduler")
        if optimizer is None:
            if scheduler is not None:
                raise ConfigurationError(
                    "--lr_scheduler is given without --optimizer, so there is nothing that it could schedule. "
                    "Write --optimizer=SGD, or leave --lr_scheduler out."
                )
            return
        if overrides(self.model, "configure_optimizers", LightningModule):
            rank_zero_warn(
                f"--optimizer is given, and {type(self.model).__name__} defines configure_optimizers, which is not "
                "called then. Leave --optimizer out to use the model's own."
            )
        configured = functools.partial(_configured, self.configure_optimizers, self.model, optimizer, scheduler)
        self.model.configure_optimizers = configured  # type: ignore[method-assign]

    def _recipe(
        self, added: Mapping[str, tuple[type | tuple[type, ...], str]], config: Namespace, kind: str
    ) -> Recipe | None:
        keys = [key for key, (_, link_to) in added.items() if link_to == AUTOMATIC]
        given = [key for key in keys if config.get(key) is not None]
        if len(given) > 1:
            raise ConfigurationError(
                f"The configuration has several of kind {kind} for one model: {', '.join(given)}. "
                f'Write parser.add_{kind}_args(..., link_to="model.<argument>") for each, and define the model\'s '
                "configure_optimizers."
            )
        return Recipe(added[given[0]][0], config[given[0]]) if given else None

    def _take_hyperparameters(self) -> None:
        """Set the model's arguments in ``self.config`` from the checkpoint at ``--ckpt_path``."""
        path = None if self.subcommand is None else self._own(self.config).get("ckpt_path")
        # the Trainer itself handles words such as "best" and "last"
        if path is not None and os.path.isfile(path):
            taken = with_hyperparameters(
                self._parser(self.subcommand), self._own(self.config), str(path), self.subclass_mode_model
            )
            self.config[str(self.subcommand)] = taken

    def _instantiators(self) -> list[tuple[Callable[..., Any], type, bool]]:
        """Return the functions that the parser calls to create the model and the data module."""
        if not self.load_from_checkpoint_support:
            return []
        kinds = (
            ("model", self.model_class, self.subclass_mode_model),
            ("data", self.datamodule_class, self.subclass_mode_data),
        )
        return [
            (functools.partial(_make, self, key), cls, subclasses)
            for key, cls, subclasses in kinds
            if isinstance(cls, type)
        ]

    def _run_subcommand(self, name: str) -> None:
        self._call_if_defined(f"before_{name}")
        config = self._own(self.config_init)
        arguments = {option: config[option] for option in self._method_options[name]}
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        getattr(self, name, getattr(self.trainer, name))(model=self.model, **arguments)
        self._call_if_defined(f"after_{name}")

    def _call_if_defined(self, name: str) -> None:
        if callable(method := getattr(self, name, None)):
            method()


def _make(
    cli: LightningCLI, key: str, cls: type, *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any
) -> Any:
    """Return an object of ``cls``. If its ``__init__`` calls ``save_hyperparameters``, this saves the configuration
    under ``key``.
    """
    values = hyperparameters(cli._parser(cli.subcommand), cli._own(cli.config), key, cls, applied_instantiation_links)
    if values is None:
        return cls(*args, **kwargs)
    with described_hyperparameters(cls, values):
        return cls(*args, **kwargs)


def _configured(
    configure: Callable[..., Any], model: LightningModule, optimizer: Recipe, scheduler: Recipe | None
) -> Any:
    made = optimizer.make(model.parameters())
    return configure(model, made) if scheduler is None else configure(model, made, scheduler.make(made))
