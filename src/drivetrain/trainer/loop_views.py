"""``trainer.fit_loop`` and the like: the counters of a run under the names that third-party callbacks read.

There are no loop objects: these are views over :class:`~drivetrain.loops.progress.Progress` and the Trainer's limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drivetrain.base.files import encodable
from drivetrain.base.registry import load
from drivetrain.errors import NotSupportedError
from drivetrain.loops.progress import RunningStage

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


_LOOP_METHODS = (
    "run", "reset", "setup_data", "on_run_start", "on_run_end", "teardown", "_evaluation_step", "_on_evaluation_start",
    "_on_evaluation_epoch_start", "_on_evaluation_epoch_end", "_on_evaluation_end", "_store_dataloader_outputs",
)  # fmt: skip
"""What a loop of Lightning's evaluations is made of, and nothing here calls."""


class Counts(NamedTuple):
    """How many of something were begun and how many are done.

    Attributes:
        ready, started: begun; ``started`` is the same, because nothing lies between the two here.
        processed, completed: done, all their hooks included.
    """

    ready: int
    started: int
    processed: int
    completed: int

    @classmethod
    def of(cls, begun: int, done: int) -> Counts:
        """Counts from the two numbers that are kept."""
        return cls(begun, begun, done, done)


class ProgressView(NamedTuple):
    """Counts over the whole run, and over the current epoch or pass; and whether that is at its last."""

    total: Counts
    current: Counts
    is_last_batch: bool = False


class _LoopView:
    _stage = "fit"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._progress = trainer.progress

    @property
    def _data_source(self) -> Any:  # GluonTS asks it in configure_optimizers whether the fit validates
        return load("drivetrain.trainer.connector_views:LoaderSource")(self._trainer, self._stage)

    @property
    def restarting(self) -> bool:
        """Whether the run was resumed from a checkpoint and has not trained a batch since."""
        return self._trainer.progress.restarting


def _limit(name: str) -> Any:  # a property; the classes below give each its type
    return property(
        lambda view: getattr(view._trainer, name),
        lambda view, value: setattr(view._trainer, name, value),
        doc="The Trainer's limit; it can be set.",
    )


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

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch; -1 before the first."""
        return self._progress.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch over all epochs; -1 before the first."""
        return self._progress.earlier_batches + self._progress.batch_idx

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self._progress.global_step

    @property
    def automatic_optimization(self) -> OptimizationView:
        """The optimizer steps that the Trainer makes."""
        return OptimizationView(self._trainer, by_hand=False)

    @property
    def manual_optimization(self) -> OptimizationView:
        """The optimizer steps that a module with ``automatic_optimization = False`` makes."""
        return OptimizationView(self._trainer, by_hand=True)

    @property
    def _batches_that_stepped(self) -> int:
        """Private in name only: callbacks take it as the step of what they log themselves."""
        return self._trainer.logger_step

    @property
    def val_loop(self) -> EvaluationView:
        """Validation inside this fit."""
        return EvaluationView(self._trainer, "validate")


class StepCounts:
    """Optimizer steps; programs that call an optimizer without its wrapper write here what they have done.

    ``trainer.global_step`` is the sum of those that the Trainer makes and of those that the module makes. Setting
    ``completed`` changes it.
    """

    def __init__(self, trainer: Trainer, by_hand: bool) -> None:
        self._trainer = trainer
        self._by_hand = by_hand

    @property
    def completed(self) -> int:
        """How many steps are done; of the kind that the module does not make, 0."""
        module = self._trainer.lightning_module
        by_hand = module is not None and not module.automatic_optimization
        return self._trainer.progress.global_step if by_hand is self._by_hand else 0

    @completed.setter
    def completed(self, count: int) -> None:
        self._trainer.progress.count_steps(count - self.completed)

    @property
    def ready(self) -> int:
        """The same, because nothing lies between the begin and the end of a step here."""
        return self.completed


class StepProgress:
    """:class:`StepCounts` under ``total``."""

    def __init__(self, trainer: Trainer, by_hand: bool) -> None:
        self.total = StepCounts(trainer, by_hand)

    def increment_ready(self) -> None:
        """A step begins: it counts when it is done."""

    def increment_completed(self) -> None:
        """Count one more step."""
        self.total.completed += 1


class OptimizationView:
    """``epoch_loop.automatic_optimization`` and ``epoch_loop.manual_optimization``: the optimizer steps of either."""

    def __init__(self, trainer: Trainer, by_hand: bool) -> None:
        self.optim_step_progress = StepProgress(trainer, by_hand)

    @property
    def optim_progress(self) -> OptimizationView:
        """Where automatic optimization has its steps: ``optim_progress.optimizer.step``."""
        return self

    @property
    def optimizer(self) -> OptimizationView:
        """See :attr:`optim_progress`."""
        return self

    @property
    def step(self) -> StepProgress:
        """See :attr:`optim_progress`."""
        return self.optim_step_progress

    @property
    def optimizer_steps(self) -> int:
        """How many steps are done."""
        return self.optim_step_progress.total.completed


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
        """Epochs of this fit and of those it resumed from."""
        p = self._progress
        begun = p.current_epoch + (p.loop_stage is not None and p.batch_idx >= 0)
        counts = Counts.of(begun, p.current_epoch)
        return ProgressView(total=counts, current=counts)

    @property
    def max_steps(self) -> int:
        """The Trainer's limit."""
        return self._trainer.max_steps

    @property
    def min_steps(self) -> int | None:
        """The Trainer's limit."""
        return self._trainer.min_steps

    @property
    def total_batch_idx(self) -> int:
        """Index of the current batch over all epochs."""
        return self.epoch_loop.total_batch_idx

    @property
    def batch_idx(self) -> int:
        """Index of the current batch in its epoch."""
        return self._progress.batch_idx

    @property
    def max_batches(self) -> float:
        """Training batches of an epoch."""
        return self._trainer.num_training_batches

    @property
    def done(self) -> bool:
        """Whether no further epoch begins."""
        run = self._trainer.current_run
        return run is None or run.training_done()


class EvaluationView(_LoopView):
    """``trainer.validate_loop`` and ``trainer.test_loop``: the pass that runs now, or ran last.

    Set either of them to an object of a subclass whose ``_print_results`` shows the results in another way.

    Args:
        trainer: whose.
        stage: "validate", "test" or "predict", or the TrainerFn.
        options: as subclasses pass them; the Trainer's arguments decide.
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
        """Check that this object may be set as ``trainer.<name>``.

        Raises:
            NotSupportedError: its class overrides what nothing here would call.
        """
        if ignored := [member for member in _LOOP_METHODS if hasattr(self, member)]:
            raise NotSupportedError(
                f"trainer.{name} was set to a {type(self).__name__}, which defines {', '.join(ignored)}. There are no "
                "loop objects: only what prints the results is called of it. Write the rest in hooks of the module "
                "or of a callback."
            )

    @property
    def batch_progress(self) -> ProgressView:
        """Batches of the current loader, and of all passes so far."""
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
        """Batches of each loader."""
        return self._trainer.num_eval_batches(self._stage)


class PredictionView(EvaluationView):
    """``trainer.predict_loop``: also what was predicted so far."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer, "predict")

    @property
    def predictions(self) -> list[Any]:
        """What the steps returned, in the host's memory; of several loaders a list for each."""
        return self._trainer.predictions.result

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        """For each loader, for each batch, the numbers of its samples; recorded for a prediction writer."""
        return self._trainer.predictions.batch_indices

    @property
    def current_batch_indices(self) -> list[int]:
        """The numbers of the samples of the current batch."""
        loaders = self._trainer.predictions.batch_indices
        return loaders[-1][-1] if loaders and loaders[-1] else []


class ViewsOfTrainer:
    """The Trainer's views: loops, and what libraries read of it under names that are private."""

    _own_loops: Mapping[str, EvaluationView] = MappingProxyType({})

    @property
    def fit_loop(self) -> FitView:
        """The counters of training under their usual names; so do the next three."""
        return FitView(self)  # type: ignore[arg-type]  # this class is the Trainer's base

    @property
    def validate_loop(self) -> EvaluationView:
        """Of validation."""
        return self._own_loops.get("validate") or EvaluationView(self, "validate")  # type: ignore[arg-type]

    @validate_loop.setter
    def validate_loop(self, loop: EvaluationView) -> None:
        loop.check_replaced("validate_loop")
        self._own_loops = {**self._own_loops, "validate": loop}

    @property
    def test_loop(self) -> EvaluationView:
        """Of testing."""
        return self._own_loops.get("test") or EvaluationView(self, "test")  # type: ignore[arg-type]

    @test_loop.setter
    def test_loop(self, loop: EvaluationView) -> None:
        loop.check_replaced("test_loop")
        self._own_loops = {**self._own_loops, "test": loop}

    @property
    def predict_loop(self) -> PredictionView:
        """Of prediction; also what was predicted."""
        return PredictionView(self)  # type: ignore[arg-type]

    # Loaded by name, so that importing the Trainer stays quick.

    @property
    def _accelerator_connector(self) -> Any:
        trainer: Any = self
        return load("drivetrain.trainer.connector_views:AcceleratorView")(trainer.plan, trainer.settings)

    @property
    def _callback_connector(self) -> Any:
        return load("drivetrain.trainer.connector_views:CallbackView")()

    @cached_property
    def _checkpoint_connector(self) -> Any:
        return load("drivetrain.trainer.connector_views:CheckpointView")(self)

    @property
    def _data_connector(self) -> Any:
        return load("drivetrain.trainer.connector_views:DataView")(self)

    @property
    def _logger_connector(self) -> Any:
        return load("drivetrain.trainer.connector_views:LoggerView")(self)

    @property
    def _results(self) -> Any:
        trainer: Any = self
        return load("drivetrain.trainer.connector_views:ResultsView")(trainer.logbook) if trainer.state.stage else None


def _table(results: list[dict[str, Any]], stage: str) -> str:
    from drivetrain.loops.results import results_table  # here, so that importing the Trainer stays quick

    numbers = [{name: float(value) for name, value in each.items()} for each in results]
    return encodable(results_table(stage, numbers))
