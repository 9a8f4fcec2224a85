"""Warnings about steps that return no loss, about trials that would never end, and about logged values that are nan or
reach no logger. A window is the batches of one optimizer step.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.advice.watch import Watch
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError
from drivetrain.logbook.logbook import Row
from drivetrain.loops.run import ENDLESS, Run
from drivetrain.module.losses import loss_of

# the limit on consecutive windows without an optimizer step; a too large initial loss scale causes fewer than 40 of
# them
PATIENCE = 100
# the error for windows without a loss comes after at least this many windows, because a step may skip its first batches
_FEWEST = 3


class Patience(Watch):
    """Ends a trial of learning rates or batch sizes in which the module makes no more optimizer steps.

    Args:
        run: a run without a limit on epochs.
    """

    _windows = 0  # the number of windows at the start of the epoch
    _step, _in_a_row = -1, 0  # the last step, and the number of windows since then

    def on_train_start(self) -> None:
        self._windows = self._run.progress.stepped_batches

    on_train_epoch_start = on_train_start

    def batches_ended(self) -> None:
        # also count an epoch that on_train_batch_start has ended before its first window
        if self._run.progress.stepped_batches == self._windows:
            self._count()

    def window_without_step(self, output: Any) -> None:
        self._count()

    def _count(self) -> None:
        """Count a window without an optimizer step. An epoch without a window counts as such a window."""
        step = self._run.progress.global_step
        self._in_a_row = self._in_a_row + 1 if step == self._step else 1
        self._step = step
        self._judge()

    def _judge(self) -> None:
        if self._in_a_row == PATIENCE:
            self._run.progress.ask_to_stop()
            rank_zero_warn(
                f"The trial of {self._run.limits.max_steps:.0f} optimizer steps ends after {self._step}: the next "
                f"{PATIENCE} windows made none. Let {type(self._run.module).__name__}.training_step return a loss, "
                "whatever global_step is."
            )


class LossWatch(Patience):
    """Checks the windows (the batches of one optimizer step) in which ``training_step`` has returned no loss.

    Args:
        run: a run with automatic optimization.
    """

    _windows_before = _windows_without = 0

    def on_train_start(self) -> None:
        super().on_train_start()
        self._windows_before = self._windows

    def window_without_step(self, output: Any) -> None:
        """Check a window without an optimizer step. ``output``: the result of the window's last ``training_step``.

        Raises:
            ConfigurationError: the code of ``training_step`` returns no value. Or no batch of the first ``max_steps``
                windows (at least 3) had a loss. Or ``training_step`` has stopped returning losses, so ``max_steps``
                cannot be reached, and there is no other limit.
        """
        if self._run.window.batches_with_gradients or loss_of(output)[0] is not None:
            return  # the window had a loss, so the step was skipped for another reason
        self._windows_without += 1
        self._count()
        if self._windows_without < self._run.progress.stepped_batches - self._windows_before:
            return  # an earlier window had a loss, so the module skips batches on purpose
        module, windows = self._run.module, self._windows_without
        name = f"{type(module).__name__}.training_step"
        if windows == 1 and output is None and returns_nothing(module.training_step):
            raise ConfigurationError(
                f"{name} has no return statement that returns a value, so nothing can be trained. End it with "
                "`return loss`. [DT1003]"
            )
        returned = "None" if output is None else "a WeightedLoss of weight 0"
        if windows >= max(self._run.limits.max_steps, _FEWEST):
            raise ConfigurationError(
                f"{name} has returned {returned} for every batch since the fit began, {windows} times what would be an "
                f"optimizer step, so max_steps={self._run.limits.max_steps:.0f} is never reached. Return the loss; "
                f"{returned} skips a batch."
            )
        if windows == 1:
            rank_zero_warn(
                f"{name} has returned {returned} for every batch of the first optimizer step, so nothing was updated. "
                "If these batches are skipped on purpose, nothing is wrong; else return the loss"
                f"{'.' if output is None else ', with the number of samples or tokens as its weight.'}"
            )

    def _judge(self) -> None:
        """Raise an error if only ``max_steps`` can end the fit, and the last windows made no optimizer step."""
        limits, batches = self._run.limits, self._run.progress.num_training_batches
        least = 10 * PATIENCE if batches == ENDLESS else max(PATIENCE, batches)
        if limits.max_epochs == ENDLESS > limits.max_steps and self._in_a_row >= least:
            raise ConfigurationError(
                f"The last {self._in_a_row} windows of batches had no loss, so global_step stays at {self._step}, and "
                f"max_steps={limits.max_steps:.0f}, which alone ends this fit, is never reached. Let "
                f"{type(self._run.module).__name__}.training_step return a loss whatever global_step is, or pass "
                "max_epochs."
            )


def returns_nothing(function: Callable[..., Any]) -> bool:
    """Whether the source of ``function`` has no ``return`` with a value. The result is false if there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return False
    if not isinstance(definition, ast.FunctionDef):
        return False  # a lambda, or a class with a __call__
    nodes = _own_nodes(definition)
    returns = [node.value for node in nodes if isinstance(node, ast.Return)]
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
        return False
    return all(value is None or (isinstance(value, ast.Constant) and value.value is None) for value in returns)


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function's syntax tree, without the bodies of inner functions and classes."""
    nodes: list[ast.AST] = []
    for node in ast.iter_child_nodes(function):
        nodes.append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            nodes += _own_nodes(node)
    return nodes


# ---- logged values --------------------------------------------------------------------------------------------------


class LogWatch(Watch):
    """Checks the values that a run has logged."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._unlogged: set[str] = set()  # names of per-step values that no logger has got yet

    def logged_nan(self, names: Sequence[str], step: int) -> None:
        if self.first("nan"):
            rank_zero_warn(
                f"{', '.join(names)}: logged as nan at step {step}; later nans are not reported. If it is the loss, "
                "the weights are, or will be, nan too: Trainer(detect_anomaly=True) names the operation that gave "
                "the first nan. [DT1018]"
            )

    def values_left(self, rows: Sequence[Row]) -> None:
        """Record which per-step values the loggers did not get; called at the end of an epoch."""
        run = self._run
        if run.log is not None and run.progress.stepped_batches < run.limits.log_every_n_steps:
            self._unlogged.update(row.name for row in rows if row.entry.to_logger)

    def on_train_end(self) -> None:
        steps, every = self._run.progress.stepped_batches, self._run.limits.log_every_n_steps
        if self._unlogged and 0 < steps < every:  # the fit has trained at least one step
            rank_zero_warn(
                f"{', '.join(sorted(self._unlogged))}: logged in training steps, but after {steps} steps no logger has "
                f"seen it, because log_every_n_steps={every}. Write a smaller log_every_n_steps. [DT1027]"
            )
