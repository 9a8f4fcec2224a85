"""Determine the folder and the file names of a ModelCheckpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.base import files
from drivetrain.base.introspect import signature_of, taken
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.spelling import warn_if_misspelt
from drivetrain.callback import Checkpoint, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, did_you_mean

GROUP = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")  # a metric in a file name: {val_loss:.2f}


class NamedCheckpoint(Checkpoint):
    """A callback that saves into one folder, under names that contain metrics.

    Attributes:
        dirpath: the folder; ``None`` before the first run, if the user gave no folder.
        filename: a template with names of metrics in braces; ``None`` means ``"{epoch}-{step}"``.
        auto_insert_metric_name: write ``name=value`` into the file name instead of the value alone.
        enable_version_counter: append ``-v1``, ``-v2``, ... rather than overwrite a file of another run.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1
    dirpath: str | None
    filename: str | None
    auto_insert_metric_name: bool
    enable_version_counter: bool
    follows_logger = False
    """Whether checkpoints go into the folder of the logger's run, because the user gave no :attr:`dirpath`."""

    _warned_of_names = False

    def decide_dirpath(self, trainer: Trainer) -> None:
        """If :attr:`dirpath` is ``None``, set it to the default folder. All ranks use rank 0's folder."""
        self.dirpath = trainer.strategy.broadcast(self.dirpath or self._default_dirpath(trainer))

    def _default_dirpath(self, trainer: Trainer) -> str:
        logger = trainer.logger
        if logger is None:
            return os.path.join(trainer.default_root_dir, "checkpoints")
        if logger.log_dir is not None:
            return os.path.join(logger.log_dir, "checkpoints")
        root = logger.save_dir or trainer.default_root_dir
        # the logger chooses the run's version only when the fit starts
        if logger.version is None and logger.is_undecided:
            return os.path.join(root, str(logger.name), "checkpoints")
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        return os.path.join(root, str(logger.name), version, "checkpoints")

    def save_folders(self, trainer: Trainer) -> list[str]:
        logger = trainer.logger
        if self.dirpath is not None or logger is None or not logger.numbers_runs:
            return [self.dirpath or self._default_dirpath(trainer)]
        own = [] if logger.is_undecided else [self._default_dirpath(trainer)]
        runs = logger.root_dir or os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name))
        inside = os.path.join(logger.sub_dir or "", "checkpoints")
        try:  # the folder of a run without a version does not exist yet
            return [*own, *(os.path.join(runs, each, inside) for each in files.names(runs))]
        except OSError:
            return own

    def _folder_is_chosen(self, trainer: Trainer) -> bool:
        """Return whether the user's arguments determine the folder, or an earlier run of this callback has set it."""
        if self.dirpath is not None:
            return True
        if trainer.logger is None:
            return trainer.settings.default_root_dir is not None
        return not trainer.logger.numbers_runs

    def _path_for(
        self,
        trainer: Trainer,
        metrics: dict[str, Any],
        replaceable: Sequence[str],
        filename: str | None,
        others: Sequence[str] = (),
    ) -> str:
        """Return a path at which no file exists, or a path in ``replaceable``."""

        def is_taken(path: str) -> bool:
            return path in others or (path not in replaceable and self.file_exists(path, trainer))

        return self._free_name(metrics, filename, is_taken)

    def _exception_path(self, trainer: Trainer) -> str:
        """Return an unused path for the checkpoint after an exception. All ranks get the same path."""
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        metrics, filename = {**trainer.callback_metrics, **place}, self.filename
        if trainer.world_size > 1 and any(name not in place for name, _ in GROUP.findall(filename or "")):
            # metrics may differ between ranks, and ranks must not communicate after an exception
            filename = "{epoch}-{step}"
        store = trainer.strategy.checkpoint_io
        return self._free_name(
            metrics, filename, lambda path: store.exists(path) or store.link_target(path) is not None
        )

    def _free_name(self, metrics: dict[str, Any], filename: str | None, is_taken: Callable[[str], bool]) -> str:
        path = first = self._name(metrics, filename)
        version, seen = self.STARTING_VERSION, set[str]()
        while self.enable_version_counter and is_taken(path):
            seen.add(path)
            path = self._name(metrics, filename, ver=version)
            if path in seen:  # an override of format_checkpoint_name ignores ``ver``
                base, extension = os.path.splitext(first)
                path = f"{base}{self.CHECKPOINT_JOIN_CHAR}v{version}{extension}"
            version += 1
        return path

    def _name(self, metrics: dict[str, Any], filename: str | None, ver: int | None = None) -> str:
        """Call ``format_checkpoint_name``. An override gets only the arguments that its signature has.

        An override that was written for an earlier version may have arguments for the epoch and the step, or lack
        ``filename``.
        """
        method: Any = self.format_checkpoint_name
        parameters = signature_of(method).parameters
        variadic = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters.values())
        if variadic or "metrics" not in parameters or "filename" in parameters:
            return str(method(metrics, filename) if ver is None else method(metrics, filename, ver=ver))
        if filename != self.filename:
            return NamedCheckpoint.format_checkpoint_name(self, metrics, filename, ver)
        given: dict[str, Any] = {"metrics": metrics, "ver": ver}
        given.update({name: int(metrics[name]) for name in ("epoch", "step") if name in metrics})
        return str(method(**taken(method, given)))

    def _check_names(self, trainer: Trainer, metrics: dict[str, Any], *templates: str | None, validated: bool) -> None:
        """Check that the metrics in file names were logged.

        Args:
            trainer: the Trainer that saves.
            metrics: values by name, including "epoch" and "step".
            templates: the file names.
            validated: whether a validation has ended, so that its metrics exist.

        Raises:
            ConfigurationError: a metric was not logged, although an epoch and a validation have ended.
        """
        wanted = [(name, template) for template in templates for name, _ in GROUP.findall(template or "")]
        name, template = next(((name, template) for name, template in wanted if name not in metrics), ("", ""))
        if not name:
            return
        message = f"ModelCheckpoint(filename={template!r}) names {name!r}, which was not logged."
        if (validated or not trainer.enable_validation) and trainer.progress.epochs_done > 0:
            raise ConfigurationError(f"{message} {trainer.why_not_validated}{did_you_mean(name, metrics)}")
        if not self._warned_of_names:
            self._warned_of_names = True
            rank_zero_warn(f"{message} Until it is logged, file names contain 0 in its place.")

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        known, monitor = {*trainer.callback_metrics, "epoch", "step"}, getattr(self, "monitor", None)
        warn_if_misspelt(f"ModelCheckpoint(monitor={monitor!r})", monitor, known)
        for name, _ in GROUP.findall(self.filename or ""):
            warn_if_misspelt(f"ModelCheckpoint(filename={self.filename!r})", name, known)

    def _warn_if_nothing_was_saved(self, trainer: Trainer, nothing: bool) -> None:
        """Warn if a fit has saved nothing because the fit was shorter than the interval between two saves."""
        numbers = {name: getattr(self, name) for name in ("every_n_train_steps", "every_n_epochs")}
        given = [f"{name}={value}" for name, value in numbers.items() if value > 1]
        kept = getattr(self, "best_model_path", "") or getattr(self, "save_top_k", 1) == 0
        if nothing and given and trainer.progress.total_batches and not kept:
            rank_zero_warn(
                f"ModelCheckpoint({', '.join(given)}) saved nothing: training ended after {trainer.current_epoch} "
                f"epochs and {trainer.progress.global_step} steps. Write a smaller number, or save_last=True."
            )

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Return whether the file exists or is being written. All ranks get the answer of rank 0."""
        store = trainer.strategy.checkpoint_io
        found = trainer.is_global_zero and (  # only rank 0 asks the store, which may be remote
            store.exists(filepath) or store.link_target(filepath) is not None or not store.is_durable(filepath)
        )
        return trainer.strategy.broadcast(found)

    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path of a checkpoint. The path ends with the extension, and begins with ``dirpath`` if that is
        set.

        A metric that is not in ``metrics`` is written as 0. With ``auto_insert_metric_name``, a ``/`` in a metric's
        name does not create a folder.

        Args:
            metrics: values by name, including "epoch" and "step".
            filename: a template with metrics in braces; ``None`` means the constructor's ``filename``.
            ver: a version to append.
            prefix: a text to put before the name and ``CHECKPOINT_JOIN_CHAR``; "" adds nothing.

        Raises:
            ConfigurationError: the format of a metric, as in ``{loss:.2f}``, does not fit the metric's value.
        """
        template = filename or self.filename or "{epoch}" + self.CHECKPOINT_JOIN_CHAR + "{step}"

        def fill(match: re.Match[str]) -> str:
            name, spec = match.group(1), match.group(2) or ""
            value = metrics.get(name, 0)
            value = value.item() if isinstance(value, Tensor) else value
            try:
                text = format(value, spec)
            except ValueError as error:
                raise ConfigurationError(
                    f"ModelCheckpoint(filename={template!r}) cannot write {name}={value!r} as {spec!r}: {error}. "
                    f"Write {{{name}:.2f}}."
                ) from error
            label = name.replace("/", "_") + self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else ""
            return label + text

        name = GROUP.sub(fill, template)
        if prefix:
            name = f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{name}"
        if ver is not None:
            name = f"{name}{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        return os.path.join(self.dirpath or "", name + self.FILE_EXTENSION)
