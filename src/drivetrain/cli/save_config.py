"""Callbacks that save the configuration of a run in the run's folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.base import files, remote
from drivetrain.base.introspect import overrides
from drivetrain.callback import Callback, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


class SaveConfigCallback(Callback):
    """Writes the complete configuration, including defaults, to the run's folder. With this file, ``--config`` repeats
    the run.

    To save the configuration elsewhere, override :meth:`save_config`. If a fit resumes from a checkpoint and the file
    exists, the new file is called ``config-v1.yaml``.

    Args:
        parser: the parser of the subcommand.
        config: the parsed configuration.
        config_filename: the file's name in ``trainer.log_dir``.
        overwrite: whether to replace an existing file of this name.
        multifile: whether to write a file for each configuration file that was read.
        save_to_log_dir: whether to write the file. If False, only call :meth:`save_config`.

    Raises:
        ConfigurationError: ``save_to_log_dir`` is False and :meth:`save_config` is not overridden.
        RunError: the file exists, ``overwrite`` is False, and the run does not resume from a checkpoint. Every rank
            raises this error.
    """

    def __init__(
        self,
        parser: ArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        super().__init__()
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and not overrides(self, "save_config", SaveConfigCallback):
            raise ConfigurationError(
                f"{type(self).__name__}(save_to_log_dir=False) would save the configuration nowhere. Derive a class "
                "that overrides save_config, or write LightningCLI(save_config_callback=None)."
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.already_saved:  # trainer.test, called after trainer.fit, uses the same configuration
            return
        if self.save_to_log_dir:
            self._write(trainer, resumes=stage == "fit" and bool(trainer.ckpt_path))
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Override this method, which does nothing by default. Rank 0 calls it once, after the file was written."""

    def _write(self, trainer: Trainer, resumes: bool) -> None:
        # every rank must read log_dir, which may call a collective
        folder = trainer.log_dir or trainer.default_root_dir
        path, name = os.path.join(folder, self.config_filename), self.config_filename
        taken = not self.overwrite and trainer.is_global_zero and files.is_file(path)
        if resumes and taken:
            stem, ending = os.path.splitext(name)
            names = (f"{stem}-v{number}{ending}" for number in itertools.count(1))
            name = next(each for each in names if not files.is_file(os.path.join(folder, each)))
        if not resumes and trainer.strategy.broadcast(taken):
            raise RunError(
                f"{path} holds the configuration of an earlier run, which this one would overwrite. Write "
                'LightningCLI(save_config_kwargs={"overwrite": True}), or give this run a folder of its own with '
                "--trainer.logger or --trainer.default_root_dir."
            )
        if not trainer.is_global_zero:
            return
        with _folder_to_write(folder, name) as local:
            self.parser.save(
                self.config, os.path.join(local, name), skip_unset=False, skip_validation=True,
                overwrite=self.overwrite, multifile=self.multifile,
            )  # fmt: skip


class SaveBesideLog(SaveConfigCallback):
    """Saves the configuration only if the run has a logger. Without a logger, the run's folder may be the working
    directory, which may have a ``config.yaml`` of the user.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


@contextlib.contextmanager
def _folder_to_write(folder: str, name: str) -> Iterator[str]:
    """Yield a local folder for writing: ``folder``, or for an address a temporary folder. The context uploads its files
    at the end.
    """
    if not files.is_remote(folder):
        os.makedirs(folder, exist_ok=True)
        files.check_replaceable(Path(folder, name))
        yield folder
        return

    with tempfile.TemporaryDirectory(prefix="drivetrain-") as local:
        yield local
        for base, _, names in os.walk(local):
            for each in names:
                path = os.path.join(base, each)
                remote.upload(path, f"{folder}/{os.path.relpath(path, local)}")
