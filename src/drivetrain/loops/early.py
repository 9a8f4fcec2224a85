"""Create the loaders' iterators as early as Lightning does, if ``early_iterators`` of ``drivetrain.parity`` is on.

A loader may draw random numbers in ``__iter__``. For example, a DataLoader draws the seed of its workers. With early
iterators, loaders draw these numbers in Lightning's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from drivetrain.data.combined import BatchList, start_batches
from drivetrain.data.feed import fetches_ahead
from drivetrain.data.kept import parts_of
from drivetrain.loops.evaluate import validates_in
from drivetrain.loops.loaders import EvalLoader
from drivetrain.loops.run import ENDLESS, Run


def start_first_epoch(run: Run) -> None:
    """Start the first pass over the training loader, before ``on_train_start``."""
    loader, num_batches = run.loaders.training(), run.loaders.count_own_training()
    _try_out(run, "fit", [loader])
    run.loaders.passes().start_early(takes_first=num_batches == ENDLESS)
    if run.validates() and validates_in(run, run.progress.current_epoch):
        _try_out(run, "validate", [source.loader for source in run.loaders.evaluation("validate")])


def start_again(run: Run) -> None:
    """Create one additional iterator of each reloaded training loader, before ``on_train_epoch_start``, because
    Lightning does so. The epoch does not use these iterators.
    """
    loader, num_batches = run.loaders.training(), run.loaders.count_own_training()
    run.loaders.tried.discard("fit")
    _try_out(run, "fit", [loader])
    for part in parts_of(loader):
        _started(part, num_batches == ENDLESS)


def start_evaluation(run: Run, group: str, loaders: list[EvalLoader]) -> None:
    """Create the first evaluation loader's iterator. Called before the stage's start hook, for example
    ``on_test_start``.
    """
    _try_out(run, group, [source.loader for source in loaders])
    for source in loaders:
        source.ahead = fetches_ahead(source.loader, source.num_batches)
    if loaders[0].num_batches:
        loaders[0].started = _started(loaders[0].loader, any(source.num_batches == ENDLESS for source in loaders))


def _started(loader: Any, takes_first: bool) -> Iterator[Any]:
    """Return an iterator over ``loader``'s batches; if ``takes_first``, fetch the first batch immediately."""
    source = start_batches(loader)
    return chain(list(islice(source, int(takes_first))), source)


def _try_out(run: Run, stage: str, loaders: list[Any]) -> None:
    """Call ``iter`` on each of the stage's loaders that is not a DataLoader, unless ``run.loaders.tried`` contains the
    stage.
    """
    if stage in run.loaders.tried:
        return
    run.loaders.tried.add(stage)
    for part in (part for loader in loaders for part in parts_of(loader)):
        if not isinstance(part, (DataLoader, BatchList)):
            iter(part)
