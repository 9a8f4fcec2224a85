"""Switches that restore Lightning's behaviour where drivetrain differs on purpose.

Each switch is off by default. The switches apply to the complete process. ``drivetrain.compat.installing.install`` sets
the switches before parts of a run are created. Each run reads the switches during its set-up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Parity:
    """The switches. Each entry describes the behaviour with the switch, and then without the switch.

    Attributes:
        padded_evaluation: in an evaluation, the first samples of the data set are repeated, so that all processes
            evaluate equally many samples. Otherwise every sample counts once.
        averaged_batch_sizes: with several processes, a ``sync_dist`` mean is the quotient of two averages over the
            processes: the average of the sums, and the average of the batch sizes, which is truncated to an integer.
            Otherwise the mean is the quotient of two exact sums.
        undersized_windows: if an epoch ends before ``accumulate_grad_batches`` batches were accumulated, losses are
            divided by ``accumulate_grad_batches``. Otherwise losses are divided by the number of accumulated batches.
        batch_counted_schedulers: the ``frequency`` of a scheduler with the interval "step" counts batches, but is
            checked only after optimizer steps. Otherwise ``frequency`` counts optimizer steps.
        summary_draws: the forward pass of a model summary with ``example_input_array`` advances the random generators.
            Otherwise the generators' states are restored after the pass.
        uneven_sweeps: in a learning-rate sweep, the second rate is two steps above the first rate. The running mean of
            n losses is divided by the weights of n + 1 losses. The loss of an optimizer step is the loss of the step's
            last batch, divided by the number of the step's batches. Slopes are computed over the rates. Each epoch is
            validated. The sweep ends with the last epoch of the fit. Otherwise the rates are evenly spaced, the mean is
            taken over the losses of complete optimizer steps, slopes are computed over the logarithms of the rates,
            there is no validation, and all rates are tried.
        early_iterators: a pass over a loader starts before the start hooks: the first training pass before
            ``on_train_start``, and an evaluation before ``on_validation_start``. Loaders that are not DataLoaders are
            started one additional time during their set-up. Training loaders are started one additional time when they
            are reloaded. A DataLoader without workers is not iterated to its end, at which a sampler with a generator
            would draw another order. Otherwise a pass starts once, after the start hooks, and the loader is exhausted.
        early_averages: stochastic weight averaging begins one epoch earlier, and averages the parameters at the start
            of each epoch. A run that ends before ``max_epochs`` keeps its trained weights. The pass that updates batch
            norm's statistics ends with an optimizer step, which uses the gradients of the training's last optimizer
            step. Otherwise parameters and buffers are averaged at the end of each epoch, including the last epoch, and
            the pass makes no optimizer step.
        iterated_batches: the size of an iterable batch is the size of the first tensor that the iteration yields, also
            if the batch is a dataclass. Otherwise the size of a dataclass is the size of its first tensor.
        pickle: checkpoints that are saved or loaded can contain any Python object. Loading such a file can run code, so
            set this switch only if you trust the files.
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
"""The switches that change computed numbers."""

_current = Parity()


def current() -> Parity:
    """Return the switches that are in effect in this process."""
    return _current


def use(switches: Parity) -> Parity:
    """Set all switches; return the previous switches."""
    global _current
    before, _current = _current, switches
    return before
