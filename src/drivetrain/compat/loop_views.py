"""``trainer.fit_loop``, ``trainer.validate_loop`` and so on: counters of a run, for callbacks that read them in
Lightning.

These objects run no loops. They read :class:`~drivetrain.loops.progress.Progress` and the Trainer's arguments, such as
``max_epochs``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from drivetrain.base.files import encodable
from drivetrain.base.introspect import reads
from drivetrain.callback import Trainer
from drivetrain.compat import connector_views
from drivetrain.errors import NotSupportedError
from drivetrain.loops.progress import RunningStage
from drivetrain.trainer.telling import results_table

_LOOP_METHODS = (
    "run", "reset", "setup_data", "on_run_start", "on_run_end", "teardown", "_evaluation_step", "_on_evaluation_start",
    "_on_evaluation_epoch_start", "_on_evaluation_epoch_end", "_on_evaluation_end", "_store_dataloader_outputs",
)  # fmt: skip
"""Methods of Lightning's evaluation loop that drivetrain never calls."""


class Counts(NamedTuple):
    """How many epochs, batches or steps have begun, and how many are finished.

    Attributes:
        ready, started: the number that have begun; always equal.
        processed, completed: the number that are finished, including their hooks; always equal.
    """

    ready: int
    started: int
    processed: int
    completed: int

    @classmethod
    def of(cls, begun: int, done: int) -> Counts:
        """Return the counts after ``begun`` starts and ``done`` ends."""
        return cls(begun, begun, done, done)


class ProgressView(NamedTuple):
    """Counts of the complete run, counts of the current epoch or loader, and whether the last batch has begun."""

    total: Counts
    current: Counts
    is_last_batch: bool = False


class _LoopView:
    _stage = "fit"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._progress = trainer.progress

    @property
    def _data_source(self) -> Any:  # the library GluonTS reads it to learn whether a fit validates
        return connector_views.LoaderSource(self._trainer, self._stage)

    restarting: bool = reads(
        "_trainer.progress.restarting", "Whether the run was resumed from a checkpoint and has trained no batch since."
    )


def _limit(name: str) -> Any:  # returns a property
    return reads(f"_trainer.{name}", "The Trainer's limit; it can be set.", writable=True)


class TrainingEpochView(_LoopView):
    """``fit_loop.epoch_loop``: the batches of the current epoch."""

    min_steps: int | None = _limit("min_steps")
    max_steps: int = _limit("max_steps")

    @property
    def batch_progress(self) -> ProgressView:
        """Training batches."""
        p = self._progress
        begun = p.batch_idx + 1
        return ProgressView(
            total=Counts.of(p.earlier_batches + begun, p.total_batches),
            current=Counts.of(begun, p.batches_done),
            is_last_batch=p.is_last_batch,
        )

    batch_idx: int = reads("_progress.batch_idx", "Index of the current batch in its epoch; -1 before the first.")

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch over all epochs; -1 before the first."""
        return self._progress.earlier_batches + self._progress.batch_idx

    global_step: int = reads("_progress.global_step", "Optimizer steps so far.")

    @property
    def automatic_optimization(self) -> OptimizationView:
        """Counts of optimizer steps with automatic optimization."""
        return OptimizationView(self._trainer, by_hand=False)

    @property
    def manual_optimization(self) -> OptimizationView:
        """Counts of optimizer steps with manual optimization."""
        return OptimizationView(self._trainer, by_hand=True)

    _batches_that_stepped: int = reads(
        "_trainer.logger_step", "Despite its private name, callbacks read it as the step of values that they log."
    )

    @property
    def val_loop(self) -> EvaluationView:
        """The validation during the fit."""
        return EvaluationView(self._trainer, "validate")


class OptimizationView:
    """``epoch_loop.automatic_optimization`` and ``epoch_loop.manual_optimization``: the optimizer steps of one mode.

    Programs for Lightning read ``optim_progress.optimizer.step.total.completed``. All attributes of this path before
    ``completed`` return this object itself. A program that calls ``step`` of a torch optimizer itself can assign its
    number of steps to ``completed``. This changes ``trainer.global_step`` by the difference.
    """

    def __init__(self, trainer: Trainer, by_hand: bool) -> None:
        self._trainer = trainer
        self._by_hand = by_hand

    @property
    def completed(self) -> int:
        """The number of finished steps; 0 if the module uses the other mode of optimization."""
        module = self._trainer.lightning_module
        by_hand = module is not None and not module.automatic_optimization
        return self._trainer.progress.global_step if by_hand is self._by_hand else 0

    @completed.setter
    def completed(self, count: int) -> None:
        self._trainer.progress.count_steps(count - self.completed)

    ready: int = reads("completed", "The same number: nothing runs between the begin and the end of a step here.")
    optimizer_steps = ready

    @property
    def total(self) -> OptimizationView:
        """This object."""
        return self

    optim_progress = optimizer = step = optim_step_progress = total

    def increment_ready(self) -> None:
        """Do nothing: drivetrain counts only finished steps."""

    def increment_completed(self) -> None:
        """Count one more step."""
        self.completed += 1


class FitView(_LoopView):
    """``trainer.fit_loop``: the epochs of a fit."""

    max_epochs: int | None = _limit("max_epochs")
    min_epochs: int | None = _limit("min_epochs")

    @property
    def epoch_loop(self) -> TrainingEpochView:
        """The batches of the current epoch."""
        return TrainingEpochView(self._trainer)

    @property
    def epoch_progress(self) -> ProgressView:
        """How many epochs have begun, and how many are finished, including the epochs before a resume."""
        p = self._progress
        begun = p.current_epoch + (p.loop_stage is not None and p.batch_idx >= 0)
        counts = Counts.of(begun, p.current_epoch)
        return ProgressView(total=counts, current=counts)

    max_steps: int = reads("_trainer.max_steps", "The Trainer's limit.")

    min_steps: int | None = reads("_trainer.min_steps", "The Trainer's limit.")

    total_batch_idx: int = reads("epoch_loop.total_batch_idx", "Index of the current batch over all epochs.")

    batch_idx: int = reads("_progress.batch_idx", "Index of the current batch in its epoch.")

    max_batches: float = reads("_trainer.num_training_batches", "Training batches of an epoch.")

    @property
    def done(self) -> bool:
        """Whether the fit is over: no further epoch begins."""
        run = self._trainer.current_run
        return run is None or run.training_done()


class EvaluationView(_LoopView):
    """``trainer.validate_loop`` and ``trainer.test_loop``: the current or last pass over the loaders.

    To print results in another form, override ``_print_results`` in a subclass, and assign an object of it to one of
    these attributes.

    Args:
        trainer: the Trainer.
        stage: "validate", "test" or "predict", or the TrainerFn.
        options: further arguments of Lightning's class, such as ``verbose``, which are ignored. The Trainer's arguments
            apply instead.
    """

    def __init__(self, trainer: Trainer, stage: Any, *options: Any, **more: Any) -> None:
        super().__init__(trainer)
        self._stage = getattr(stage, "value", stage)

    @staticmethod
    def _print_results(results: list[dict[str, Any]], stage: str) -> None:
        """Show the results of ``stage``, one dictionary of tensors per loader."""
        print(_table(results, stage))

    def show(self, results: list[dict[str, float]]) -> None:
        """Show the results of the evaluation, on rank 0."""
        if type(self)._print_results is EvaluationView._print_results:
            self._trainer.print(_table(results, self._stage))
        elif self._trainer.is_global_zero:
            self._print_results(
                [{name: torch.tensor(value) for name, value in each.items()} for each in results], self._stage
            )

    def check_replaced(self, name: str) -> None:
        """Check that this object can be assigned to ``trainer.<name>``.

        Raises:
            NotSupportedError: drivetrain would never call a method that the object's class defines.
        """
        if ignored := [member for member in _LOOP_METHODS if hasattr(self, member)]:
            raise NotSupportedError(
                f"trainer.{name} was set to a {type(self).__name__}, which defines {', '.join(ignored)}. "
                "drivetrain calls only the method of this object that prints the results. Write the rest in hooks of "
                "the module or of a callback."
            )

    @property
    def batch_progress(self) -> ProgressView:
        """Counts of batches: in total, and of the current loader."""
        p = self._progress
        running = p.loop_stage is not None and p.loop_stage.value in (self._stage, RunningStage.SANITY_CHECKING.value)
        begun = p.eval_batch_idx + 1 if running else 0
        earlier = sum(p.eval_steps.get(self._stage, ()))
        return ProgressView(
            total=Counts.of(earlier + begun, earlier + max(begun - 1, 0)),
            current=Counts.of(begun, max(begun - 1, 0)),
            is_last_batch=running and begun == p.num_eval_batches,
        )

    @property
    def max_batches(self) -> list[float]:
        """The number of batches of each loader."""
        return self._trainer.num_eval_batches(self._stage)


class PredictionView(EvaluationView):
    """``trainer.predict_loop``, which also has the predictions so far."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer, "predict")

    predictions: list[Any] = reads(
        "_trainer.predictions.result",
        "The outputs of the steps, in the host's memory; with several loaders, one list per loader.",
    )
    epoch_batch_indices: list[list[list[int]]] = reads(
        "_trainer.predictions.batch_indices",
        "For each loader and batch, the indices of its samples; recorded only for a prediction writer.",
    )
    current_batch_indices: list[int] = reads(
        "_trainer.predictions.current_batch_indices", "The sample indices of the current batch."
    )


def _evaluation_loop(stage: str) -> Any:
    """Return the property ``validate_loop`` or ``test_loop``. A program can assign an :class:`EvaluationView` to the
    property.
    """

    def read(trainer: Trainer) -> EvaluationView:
        found: EvaluationView | None = trainer._own_loops.get(stage)
        return found or EvaluationView(trainer, stage)

    def write(trainer: Trainer, loop: EvaluationView) -> None:
        loop.check_replaced(f"{stage}_loop")
        trainer._own_loops = {**trainer._own_loops, stage: loop}

    return property(read, write)


def _checkpoint_view(trainer: Trainer) -> connector_views.CheckpointView:
    """Return the Trainer's only CheckpointView, which keeps the checkpoint between calls of its methods."""
    kept = vars(trainer)
    if "_checkpoint_view" not in kept:
        kept["_checkpoint_view"] = connector_views.CheckpointView(trainer)
    return kept["_checkpoint_view"]


class ViewsOfTrainer:
    """Properties with Lightning's names that the Trainer gets through :func:`familiar_property`."""

    fit_loop = property(FitView)
    validate_loop = _evaluation_loop("validate")
    test_loop = _evaluation_loop("test")
    predict_loop = property(PredictionView)
    _accelerator_connector = property(lambda trainer: connector_views.AcceleratorView(trainer.plan, trainer.settings))
    _callback_connector = property(lambda trainer: connector_views.CallbackView())
    _checkpoint_connector = property(_checkpoint_view)
    _data_connector = property(connector_views.DataView)
    _logger_connector = property(connector_views.LoggerView)
    _results = property(lambda trainer: connector_views.ResultsView(trainer.logbook) if trainer.state.stage else None)


def familiar_property(name: str) -> Any:
    """Return a property of :class:`ViewsOfTrainer`."""
    return vars(ViewsOfTrainer)[name]


def _table(results: list[dict[str, Any]], stage: str) -> str:
    numbers = [{name: float(value) for name, value in each.items()} for each in results]
    return encodable(results_table(stage, numbers))
