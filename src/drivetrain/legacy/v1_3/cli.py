"""LightningCLI of Lightning 1.3, without subcommands: the constructor parses the command line and runs a fit."""

from __future__ import annotations

from typing import Any

import drivetrain.cli
from drivetrain.cli import SaveConfigCallback
from drivetrain.legacy.v1_3.trainer import Trainer


class LightningCLI(drivetrain.cli.LightningCLI):
    """Creates the model, the data module and the Trainer from options such as ``--model.lr=0.1``, and runs a fit.

    Args:
        model_class, datamodule_class, save_config_callback, trainer_class, trainer_defaults, seed_everything_default:
            as for drivetrain's LightningCLI, but the default Trainer has the flags of Lightning 1.3.
        kwargs: further arguments of drivetrain's class. The parser gets ``description``, ``env_prefix`` and
            ``env_parse``.
    """

    def __init__(
        self,
        model_class: Any,
        datamodule_class: Any = None,
        save_config_callback: Any = SaveConfigCallback,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: Any = None,
        **kwargs: Any,
    ) -> None:
        parser = dict(kwargs.pop("parser_kwargs", None) or {})
        for name, today in (("description", "description"), ("env_prefix", "env_prefix"), ("env_parse", "default_env")):
            if name in kwargs:
                parser[today] = kwargs.pop(name)
        self.fit_result: Any = None
        super().__init__(
            model_class, datamodule_class, save_config_callback, trainer_class=trainer_class,
            trainer_defaults=trainer_defaults, parser_kwargs=parser, run=False,
            seed_everything_default=False if seed_everything_default is None else seed_everything_default, **kwargs,
        )  # fmt: skip
        self.fit_kwargs: dict[str, Any] = {}
        self.prepare_fit_kwargs()
        self.before_fit()
        self.fit()
        self.after_fit()

    def prepare_fit_kwargs(self) -> None:
        """Fill ``self.fit_kwargs``, the arguments of ``trainer.fit``."""
        self.fit_kwargs = {"model": self.model}
        if self.datamodule is not None:
            self.fit_kwargs["datamodule"] = self.datamodule

    def before_fit(self) -> None:
        """Called before the fit, after the objects are created."""

    def fit(self) -> None:
        """Train."""
        self.fit_result = self.trainer.fit(**self.fit_kwargs)

    def after_fit(self) -> None:
        """Called after the fit."""
