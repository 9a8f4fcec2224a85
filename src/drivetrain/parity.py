"""Switches that restore Lightning's behaviour where drivetrain differs on purpose.

Each switch is off by default. They belong to the process: ``drivetrain.compat`` sets them, before anything is built,
and a run reads them when it is set up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parity:
    """The switches.

    Attributes:
        padded_evaluation: several processes evaluate as many samples each, the first ones of the data set twice where
            they do not divide; else every sample counts once.
        averaged_batch_sizes: over several processes, a ``sync_dist`` mean is the quotient of two averages of which the
            second, the batch size, is cut to an integer; else of two exact sums.
        undersized_windows: the loss of a window that an epoch's end cuts short is divided by the full
            ``accumulate_grad_batches``; else by the batches that it holds.
        batch_counted_schedulers: a step scheduler's ``frequency`` counts batches, and is asked after optimizer steps
            only; else it counts optimizer steps.
        summary_draws: the trial pass through ``example_input_array`` that a model summary makes leaves the random
            generators as it used them; else as they were before.
        uneven_sweeps: in a learning rate sweep the second rate is two steps above the first, the running mean of n
            losses is divided by the weights of n + 1, of a window only the last batch counts, divided by the window,
            slopes are those over the rates, and each epoch is validated. Else rates are even, the mean is that of the
            windows' losses, slopes are those over the logarithms of the rates, and nothing is validated.
        early_iterators: a pass over a loader starts before the hooks of the epoch's start: the first training pass
            before ``on_train_start``, an evaluation before ``on_validation_start``. Loaders that are no DataLoader are
            started once more when they are set up, and all training loaders when they are reloaded. Else a pass starts
            after those hooks, and nothing else does.
        early_averages: stochastic weight averaging begins an epoch earlier, and averages the parameters as they are
            when an epoch starts. A run that ends before ``max_epochs`` keeps its trained weights. The pass for the
            statistics of batch norm ends with an optimizer step by the last window's gradients. Else it averages
            parameters and buffers when an epoch ends, the last one included, and that pass makes no step.
        pickle: checkpoints may hold, and be read with, any Python object. Reading one runs what it says, so this is
            for files that one trusts.
    """

    padded_evaluation: bool = False
    averaged_batch_sizes: bool = False
    undersized_windows: bool = False
    batch_counted_schedulers: bool = False
    summary_draws: bool = False
    uneven_sweeps: bool = False
    early_iterators: bool = False
    early_averages: bool = False
    pickle: bool = False


NUMBERS = (
    "padded_evaluation",
    "averaged_batch_sizes",
    "undersized_windows",
    "batch_counted_schedulers",
    "summary_draws",
    "uneven_sweeps",
    "early_iterators",
    "early_averages",
)
"""The switches that change numbers."""

_current = Parity()


def current() -> Parity:
    """Return the switches as they are now."""
    return _current


def use(switches: Parity) -> Parity:
    """Set all of them; return what was current before."""
    global _current
    before, _current = _current, switches
    return before
