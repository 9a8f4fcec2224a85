"""Calls the Trainer's loggers, converts their errors to warnings, lets them continue the runs of a checkpoint, and
prints results.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from drivetrain.base import notebook
from drivetrain.base.files import encodable
from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.registry import load
from drivetrain.errors import ConfigurationError


def show(trainer: Any, stage: str, results: list[dict[str, float]]) -> None:
    """Print the results of an evaluation on rank 0. If the program has assigned an object to ``validate_loop`` or
    ``test_loop``, this object prints the results.
    """
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
    """Log ``metrics`` with every logger. On rank 0, also add ``metrics`` to ``trainer.history``."""
    keep(trainer, metrics, step)
    tell(trainer, "log_metrics", metrics=metrics, step=step)


def keep(trainer: Any, metrics: Mapping[str, float], step: int) -> None:
    """Add ``metrics`` to ``trainer.history`` on rank 0."""
    if trainer.is_global_zero:
        trainer.history.add(metrics, step, trainer.progress.current_epoch)


def tell(trainer: Any, method: str, *args: Any, begins: bool = False, **named: Any) -> None:
    """Call ``method`` of every logger of ``trainer``.

    An exception of a logger does not end the run. The first failure of each logger causes a warning; later failures are
    ignored.

    Args:
        trainer: the Trainer with the loggers.
        method: the name of the method.
        args, named: the arguments of ``method``.
        begins: whether the run is being set up. If so, a ConfigurationError of a logger ends the run.
    """
    for logger in trainer.loggers:
        tell_one(trainer, logger, method, *args, begins=begins, **named)


def tell_one(trainer: Any, logger: Any, method: str, *args: Any, begins: bool = False, **named: Any) -> None:
    """Call ``method`` of one logger. Exceptions are handled as in :func:`tell`."""
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
    """Let the loggers write their values, and return the loggers' states for a checkpoint, by class and index.

    The loggers write first, because a resumed run does not log the values from before the checkpoint again.
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


def continue_numbered_runs(trainer: Any, checkpoint: Mapping[str, Any] | None, path: str) -> None:
    """Let loggers that number their runs continue the runs of the checkpoint at ``path``.

    ``path`` is the program's newest checkpoint, and ``checkpoint`` contains its entries; ``None`` if they cannot be
    read yet.
    """
    states = {} if checkpoint is None else checkpoint.get("loggers", {})
    for key, logger in _keyed(trainer):
        if checkpoint is None or (isinstance(states, Mapping) and key in states):
            tell_one(trainer, logger, "continue_run", states.get(key, {}), path, begins=True)


def continue_runs(trainer: Any, checkpoint: Mapping[str, Any] | None, same_loggers: bool) -> None:
    """Let the loggers of a fit continue the logged runs named in ``checkpoint``, or begin new runs. All ranks must call
    this function.

    Args:
        trainer: the Trainer with the loggers.
        checkpoint: the checkpoint from which the fit resumes, or ``None``.
        same_loggers: whether the loggers are equal on all ranks.
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


# ---- results --------------------------------------------------------------------------------------------------------


def results_table(stage: str, results: list[dict[str, float]], width: int | None = None) -> str:
    """Return the metrics of each loader as a table for the terminal: one row per metric, one column per loader.

    With several loaders, the suffix of a metric's name (``/dataloader_idx_1``) becomes the heading of a column. A cell
    is empty if the metric was not logged for the loader. If the table is wider than the terminal, the remaining columns
    follow below.

    Args:
        stage: the title.
        results: one dictionary of metrics per loader.
        width: the terminal's width in characters; ``None``: determine it.
    """
    columns, names = _columns(results)
    if not names:
        return f"{stage}: nothing was logged"
    first = max(len(name) for name in names) + 2  # the width includes the indent
    if len(columns) == 1:
        return "\n".join([f"{stage}:", *(f"{'  ' + name:<{first}}  {columns[0][name]}" for name in names)])
    headings = [f"loader {index}" for index in range(len(columns))]
    wide = [max(map(len, (heading, *column.values()))) + 2 for heading, column in zip(headings, columns, strict=True)]
    first = max(first, len(stage) + 1)
    fits = max(1, ((width or shutil.get_terminal_size().columns) - first) // max(wide))
    lines: list[str] = []
    for begin in range(0, len(columns), fits):
        shown = range(begin, min(begin + fits, len(columns)))
        lines.append(f"{stage + ':':<{first}}" + "".join(f"{headings[i]:>{wide[i]}}" for i in shown))
        lines += [
            f"{'  ' + name:<{first}}" + "".join(f"{columns[i].get(name, ''):>{wide[i]}}" for i in shown)
            for name in names
            if any(name in columns[i] for i in shown)
        ]
    return "\n".join(line.rstrip() for line in lines)


def results_html(stage: str, results: list[dict[str, float]]) -> str:
    """Return the metrics of each loader as an HTML table: one row per metric, one column per loader."""
    columns, names = _columns(results)
    if not names:
        return notebook.table([(f"{stage}: nothing was logged",)])
    headings = [f"loader {index}" for index in range(len(columns))] if len(columns) > 1 else [""]
    return notebook.table([(name, *(column.get(name, "") for column in columns)) for name in names], [stage, *headings])


def _columns(results: list[dict[str, float]]) -> tuple[list[dict[str, str]], list[str]]:
    """Return the metrics of each loader, as strings, and the names of all metrics."""
    columns = [
        {name.removesuffix(f"/dataloader_idx_{index}"): number_text(value) for name, value in result.items()}
        for index, result in enumerate(results)
    ]
    return columns, sorted({name for column in columns for name in column})


def number_text(value: float) -> str:
    """Return a metric's value as text: six digits, without an exponent if possible."""
    if 1e6 <= abs(value) < 1e15:
        return f"{value:.0f}"
    digits, exponent, power = f"{value:.6g}".partition("e")
    return f"{digits}{exponent}{int(power)}" if exponent else digits
