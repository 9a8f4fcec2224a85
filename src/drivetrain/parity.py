"""Switches that restore Lightning's behaviour where drivetrain differs on purpose.

Each switch is off by default. The switches apply to the whole process: ``drivetrain.compat.installing.install`` sets
them before parts of a run are created, and each run reads them when it is set up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Parity:
    """The switches.

    Attributes:
        padded_evaluation: all processes evaluate equally many samples, by repeating the first samples of the data set;
            otherwise every sample counts once.
        averaged_batch_sizes: with several processes, a ``sync_dist`` mean is the quotient of two averages, of which the
            second, the batch size, is truncated to an integer; otherwise it is the quotient of two exact sums.
        undersized_windows: if an epoch ends before ``accumulate_grad_batches`` batches were accumulated, losses are
            still divided by ``accumulate_grad_batches``; otherwise by the number of batches that were accumulated.
        batch_counted_schedulers: the ``frequency`` of a scheduler with the interval "step" counts batches, and is
            checked only after optimizer steps; otherwise ``frequency`` counts optimizer steps.
        summary_draws: the forward pass of a model summary with ``example_input_array`` advances the random generators;
            otherwise their states are restored after the pass.
        uneven_sweeps: in a learning rate sweep the second rate is two steps above the first, the running mean of n
            losses is divided by the weights of n + 1, the loss of an optimizer step is that of the step's last batch,
            divided by the number of the step's batches, slopes are those over the rates, each epoch is validated, and
            the sweep ends with the last epoch of the fit. Otherwise rates are evenly spaced, the mean is taken over the
            losses of whole optimizer steps, slopes are computed over the logarithms of the rates, nothing is validated,
            and all rates are tried.
        early_iterators: a pass over a loader starts before the epoch's start hooks: the first training pass before
            ``on_train_start``, an evaluation before ``on_validation_start``. Loaders that are not DataLoaders are
            started once more when they are set up, and all training loaders when they are reloaded. A DataLoader
            without workers is not iterated to its end, where a sampler with a generator would draw another order.
            Otherwise a pass starts once, after those hooks, and the loader is exhausted.
        early_averages: stochastic weight averaging begins an epoch earlier, and averages the parameters at the start of
            an epoch. A run that ends before ``max_epochs`` keeps its trained weights. The pass for the statistics of
            batch norm ends with an optimizer step, with the gradients of the training's last optimizer step. Otherwise
            parameters and buffers are averaged at the end of each epoch, including the last, and the pass for batch
            norm makes no optimizer step.
        iterated_batches: the size of a batch that can be iterated over is that of the first tensor that its iteration
            gives, also if the batch is a dataclass; otherwise a dataclass has the size of its first tensor.
        pickle: checkpoints may contain any Python object, also when they are read. Reading such a file can run code, so
            use it only for files that you trust.
    """

    padded_evaluation: bool = False
    averaged_batch_sizes: bool = False
    undersized_windows: bool = False
    batch_counted_schedulers: bool = False
    summary_draws: bool = False
    uneven_sweeps: bool = False
    early_iterators: bool = False
    early_averages: bool = False
    iterated_batches: bool = False
    pickle: bool = False


NUMBERS = tuple(each.name for each in fields(Parity) if each.name != "pickle")
"""The switches that change numbers."""

_current = Parity()


def current() -> Parity:
    """Return the switches that are in effect in this process."""
    return _current


def use(switches: Parity) -> Parity:
    """Set all switches; return the previous ones."""
    global _current
    before, _current = _current, switches
    return before
