"""Calls of the Trainer's loggers, which may fail; the logged runs that a checkpoint continues; printed results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.base import notebook
from drivetrain.base.files import encodable
from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError
from drivetrain.loops.results import results_html, results_table


def show(trainer: Any, stage: str, results: list[dict[str, float]]) -> None:
    """Print the results of an evaluation on rank 0, or let the loop object that the program has set print them."""
    if (loop := trainer._own_loops.get(stage)) is not None:
        loop.show(results)
    elif trainer.is_global_zero:
        notebook.show(encodable(results_table(stage, results)), results_html(stage, results))


def check_loggers(trainer: Any, callback: Any) -> None:
    """Check that there is a logger for the values of ``callback``.

    Raises:
        ConfigurationError: there is no logger.
    """
    if not trainer.loggers:
        raise ConfigurationError(
            f"{type(callback).__name__} has nowhere to log to: Trainer(logger={trainer.settings.logger!r}) has no "
            "logger. Pass logger=True to the Trainer, or remove this callback."
        )


def log(trainer: Any, metrics: Mapping[str, float], step: int) -> None:
    """Log ``metrics`` with every logger and, on rank 0, add them to ``trainer.history``."""
    keep(trainer, metrics, step)
    tell(trainer, "log_metrics", metrics=metrics, step=step)


def keep(trainer: Any, metrics: Mapping[str, float], step: int) -> None:
    """Add ``metrics`` to ``trainer.history`` on rank 0."""
    if trainer.is_global_zero:
        trainer.history.add(metrics, step, trainer.progress.current_epoch)


def tell(trainer: Any, method: str, *args: Any, begins: bool = False, **named: Any) -> None:
    """Call ``method`` of every logger of ``trainer``.

    A logger that raises does not end the run: its first failure is a warning, and later ones are ignored.

    Args:
        trainer: the Trainer with the loggers.
        method: its name.
        args, named: the arguments of ``method``.
        begins: whether the run is being set up; a ConfigurationError is then raised, because its message contains the
            correction.
    """
    for logger in trainer.loggers:
        tell_one(trainer, logger, method, *args, begins=begins, **named)


def tell_one(trainer: Any, logger: Any, method: str, *args: Any, begins: bool = False, **named: Any) -> None:
    """Call ``method`` of one logger, as :func:`tell` does."""
    try:
        getattr(logger, method)(*args, **named)
    except Exception as error:
        if begins and isinstance(error, ConfigurationError):
            raise
        if not any(each is logger for each in trainer._failed_loggers):
            trainer._failed_loggers.append(logger)
            rank_zero_warn(
                f"{type(logger).__name__}.{method} failed, and what it was given may be lost: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. The run continues, and further failures of this "
                "logger are not reported. Free disk space or repair the connection, and it continues to log."
            )


def states_of(trainer: Any) -> dict[str, Any]:
    """Let the loggers write, and return their states for a checkpoint, by class and index.

    What is logged before a checkpoint must not be lost with the process: a run that resumes from the checkpoint does
    not log it again.
    """
    if trainer.is_global_zero:
        tell(trainer, "save")
    return {key: state for key, logger in _keyed(trainer) if (state := logger.state_dict())}


def _keyed(trainer: Any) -> list[tuple[str, Any]]:
    keyed: list[tuple[str, Any]] = []
    for logger in trainer.loggers:
        name = type(logger).__qualname__
        number = sum(key.partition("#")[0] == name for key, _ in keyed)
        keyed.append((f"{name}#{number}" if number else name, logger))
    return keyed


def continue_runs(trainer: Any, checkpoint: Mapping[str, Any] | None, same_loggers: bool) -> None:
    """Let the loggers of a fit continue the logged runs in ``checkpoint``, or begin new ones; all ranks call it.

    Args:
        trainer: the Trainer with the loggers.
        checkpoint: the checkpoint from which the fit resumes, or ``None``.
        same_loggers: all ranks have the same loggers.
    """
    states = {} if checkpoint is None else checkpoint.get("loggers", {})
    continued = False
    for key, logger in _keyed(trainer):
        if isinstance(states, Mapping) and (state := states.get(key)):
            tell_one(trainer, logger, "load_state_dict", state, begins=True)
            continued = True
    base = load("drivetrain.loggers.logger:Logger")
    begun = [logger for logger in trainer.loggers if overrides(logger, "begin_run", base)]
    for logger in begun:
        tell_one(trainer, logger, "begin_run", begins=True)
        if same_loggers:
            logger.agree_on_run(trainer.strategy.broadcast)
    for callback in trainer.checkpoint_callbacks if (begun or continued) and same_loggers else ():
        if getattr(callback, "follows_logger", False):
            callback.dirpath = None
            callback.decide_dirpath(trainer)
