"""Warnings about swapped loaders, ranks with equal samples, and lost predictions; advice on loaders that make a run
slow.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from drivetrain.advice.watch import Watch
from drivetrain.base.fingerprint import fingerprints
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.tree import leaves
from drivetrain.data.kept import parts_of
from drivetrain.loops.evaluate import Predictions
from drivetrain.loops.run import Run

_COMPARED = 65_536  # the number of values of a batch that are compared between the ranks
# the wait for the first batch is long if it takes at least this fraction of the epoch, and this many seconds
_LONG_WAIT, _LONG_WAIT_S = 0.25, 0.1


class DataWatch(Watch):
    """Compares the loaders of a run, and the samples of the ranks."""

    def __init__(self, run: Run, predictions: Predictions) -> None:
        super().__init__(run)
        self._predictions = predictions
        self._epoch_began, self._epochs, self._workers_advised = 0.0, 0, False

    def on_train_start(self) -> None:
        """Advise ``pin_memory=True`` for a training loader with workers, because copies from other memory make the host
        wait.
        """
        run = self._run
        self._compare_loaders()
        for loader in parts_of(run.loaders.training()) if run.engine.accelerator.supports_pinned_memory else ():
            if isinstance(loader, DataLoader) and loader.num_workers and not loader.pin_memory:
                rank_zero_info(
                    f"The training loader has num_workers={loader.num_workers} and pin_memory=False, so the host waits "
                    "in each copy of a batch to the device. Write DataLoader(..., pin_memory=True)."
                )

    def on_train_epoch_start(self) -> None:
        self._epoch_began, self._epochs = time.perf_counter(), self._epochs + 1

    def epoch_closed(self) -> None:
        """Advise persistent workers if the wait for an epoch's first batch takes a large part of the epoch. The first
        epoch of a fit is not checked.
        """
        self._compare_loaders()
        if self._workers_advised or self._epochs < 2:
            return
        run, seconds = self._run, time.perf_counter() - self._epoch_began
        waited = run.loaders.passes().seconds_to_first
        if waited < max(_LONG_WAIT * seconds, _LONG_WAIT_S):
            return
        for loader in parts_of(run.loaders.training()):
            if isinstance(loader, DataLoader) and loader.num_workers and not loader.persistent_workers:
                self._workers_advised = True
                rank_zero_info(
                    f"An epoch took {seconds:.2f} s, and its first batch came after {waited:.2f} s: the training "
                    f"loader, with num_workers={loader.num_workers}, starts its workers again in each epoch. Write "
                    "DataLoader(..., persistent_workers=True) to keep them, with their copy of the dataset and their "
                    "random generators."
                )

    def _compare_loaders(self) -> None:
        """Warn if the validation loader shuffles and the training loader does not.

        The check runs as soon as the validation loaders exist: at the start of the fit, or after the first validation.
        """
        run = self._run
        if not (run.validates() and run.loaders.is_known("validate") and self.first("comparison of loaders")):
            return
        training = getattr(run.loaders.training(), "sampler", None)
        others = [getattr(each.loader, "sampler", None) for each in run.loaders.evaluation("validate")]
        if isinstance(training, SequentialSampler) and others and isinstance(others[0], RandomSampler):
            rank_zero_warn(
                "The validation loader shuffles, and the training loader does not. If they were swapped, write "
                "trainer.fit(model, train_loader, val_loader)."
            )

    def before_validation(self) -> None:
        """Warn if all ranks have trained on equal batches.

        The first call in a fit compares the batches of all ranks, so all ranks must make this call. Later calls do
        nothing.
        """
        run = self._run
        if run.window.gather is None or not self.first("comparison of samples"):
            return
        digests = run.engine.strategy.data.gather_objects(_digest(run.book.batch))
        if None not in digests and len(set(digests)) == 1 and not run.uneven.draws:
            rank_zero_warn(
                "All ranks have trained on the same batch, from a loader that drivetrain does not divide, so each "
                "may train on all samples. Let each rank take its own: an IterableDataset by trainer.global_rank, a "
                "DistributedSampler by its rank. If this is meant, nothing is wrong."
            )

    batches_ended = before_validation

    def results_agreed(self, stage: str) -> None:
        """Warn if the ranks have logged different values without ``sync_dist``, because loggers and callbacks get only
        rank 0's values.

        All ranks must call this method, because the ranks exchange their values, once for each stage of a run.
        """
        run = self._run
        if run.window.gather is None or stage not in ("validate", "test") or not self.first(stage):
            return
        rows = run.book.epoch_values(stage)
        own = {row.name: float(row.value) for row in rows if not row.entry.shared and row.entry.metric is None}
        everyones = run.engine.strategy.data.gather_objects(own)
        values = {name: [theirs[name] for theirs in everyones if name in theirs] for name in own}
        differing = [name for name, numbers in values.items() if max(numbers) > min(numbers)]
        if differing:
            first = differing[0]
            shown = ", ".join(f"{number:.4g}" for number in values[first][:8])
            rank_zero_warn(
                f"{', '.join(differing)}: logged without sync_dist, and the ranks, which see different samples, have "
                f"different values ({first}: {shown}). Loggers, checkpoints and early stopping see rank 0's alone. "
                f"Write self.log({first!r}, ..., sync_dist=True)."
            )

    def on_predict_end(self) -> None:
        """Warn if all predictions are None, or if a prediction loader shuffles."""
        run, predictions = self._run, self._predictions
        if not predictions.keeps:
            return
        outputs = [output for each in predictions.outputs for output in each]
        written = any(run.hooks.overriders("on_predict_batch_end"))
        if outputs and all(output is None for output in outputs) and not written:
            rank_zero_warn(
                f"{type(run.module).__name__}.predict_step returned None for every batch, so predict returns a list of "
                "None. End it with `return predictions`, or, if it writes them itself, call predict with "
                "return_predictions=False."
            )
        loaders = [] if predictions.records else [each.loader for each in run.loaders.evaluation("predict")]
        if any(isinstance(getattr(loader, "sampler", None), RandomSampler) for loader in loaders):
            rank_zero_warn(
                "A loader for predictions shuffles, so the predictions come in a random order, not in the dataset's. "
                "Write shuffle=False."
            )


def _digest(batch: Any) -> int | None:
    """Return the fingerprint of the first tensor in ``batch`` whose values are not all equal; ``None`` if there is
    none.
    """
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_complex():
            values = leaf.detach().flatten()[:_COMPARED].cpu().double()
            if values.numel() > 1 and bool((values != values[0]).any()):
                return int(fingerprints([values]))
    return None
