"""The Trainer's properties, with which user code, callbacks and loggers read the state and the objects of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.introspect import is_own_class, reads
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.supplied import supplied
from drivetrain.callback import Callback, Checkpoint, connect_module
from drivetrain.engine.engine import Engine
from drivetrain.engine.ranks import RankFacts
from drivetrain.engine.wrappers import unwrapped
from drivetrain.logbook.history import History, figure_of
from drivetrain.logbook.logbook import Logbook
from drivetrain.loops.evaluate import Predictions, validation_follows
from drivetrain.loops.progress import Phase, Progress, RunningStage, TrainerFn, TrainerStatus
from drivetrain.loops.run import ENDLESS, Run
from drivetrain.module.hooks import HookTable
from drivetrain.module.optimizers import LRSchedulerConfig
from drivetrain.plan import Plan
from drivetrain.strategies.strategy import Strategy
from drivetrain.trainer.limits import LimitsView

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.advice.sampler import Sampler
    from drivetrain.advice.time_spent import TimeSpent
    from drivetrain.loggers.logger import Logger

with on_first_use:
    from drivetrain.trainer import telling


# These functions return properties, whose types the class body declares.


def _is_running(stage: RunningStage, doc: str) -> Any:
    return property(lambda trainer: trainer.progress.stage is stage, doc=doc)


def _made_loaders(stage: str, doc: str) -> Any:
    return property(
        lambda trainer: None if trainer._run_parts is None else trainer._run_parts.loaders.made(stage), doc=doc
    )


def _batch_counts(stage: str, doc: str) -> Any:
    return property(lambda trainer: trainer.num_eval_batches(stage), doc=doc)


@supplied
def familiar_property(name: str) -> Any:
    """Return the Trainer's property that has Lightning's name ``name``."""
    raise AttributeError(f"This Trainer has no {name}, which a part of drivetrain supplies that is not loaded.")


class Familiar:
    """A property whose getter and setter are imported at the first use; see :func:`familiar_property`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else familiar_property(self._name).__get__(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        familiar_property(self._name).__set__(trainer, value)


class TrainerView(LimitsView, RankFacts):
    """The Trainer's properties. Objects that user code replaces during a run take effect at the next batch."""

    engine: Engine
    logbook: Logbook
    predictions: Predictions
    default_root_dir: str
    received_sigterm: bool = False
    _callbacks: list[Callback]
    _loggers: list[Logger]
    _hooks: HookTable | None = None
    _run_parts: Run | None = None
    _ckpt_path: str | None = None
    _set_ckpt_path: str | Path | None = None
    _time_spent: TimeSpent | None = None
    _sampler: Sampler | None = None  # measures the running fit's time
    _launch: str = ""  # identifies the fit's processes in the record of a run
    _saved_at_stop: Sequence[str] = ()  # checkpoints that the last fit saved because it was asked to end

    fit_loop: Any = Familiar()
    validate_loop: Any = Familiar()
    test_loop: Any = Familiar()
    predict_loop: Any = Familiar()
    _accelerator_connector: Any = Familiar()
    _callback_connector: Any = Familiar()
    _checkpoint_connector: Any = Familiar()
    _data_connector: Any = Familiar()
    _logger_connector: Any = Familiar()
    _results: Any = Familiar()

    _own_loops: Mapping[str, Any] = MappingProxyType({})
    """For each stage, the object that a program has assigned to ``validate_loop`` or ``test_loop``."""

    @property
    def hooks(self) -> HookTable:
        """The hook table of the current run."""
        assert self._hooks is not None  # a run has begun
        return self._hooks

    plan: Plan = reads("engine.plan", "What was decided for this Trainer, with the reasons: ``print(trainer.plan)``.")
    strategy: Strategy = reads("engine.strategy", "The strategy.")
    precision_plugin: Any = reads("strategy.precision_plugin", "The numeric precision.")
    lightning_module: Any = reads("strategy.lightning_module", "The user's module, or ``None`` before the first run.")
    model: torch.nn.Module | None = reads("strategy.model", "The module as wrapped by the strategy.")
    current_run: Run | None = reads(
        "_run_parts", "The parts of the current run, or of the last; ``None`` before the first."
    )

    @property
    def accelerator(self) -> Accelerator:
        """The strategy's accelerator."""
        return self.engine.accelerator

    @property
    def precision(self) -> str:
        """The name of the numeric precision, for example "32-true"."""
        return self.strategy.precision_plugin.name

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks in the order in which the Trainer calls them."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, value: list[Callback]) -> None:
        self._callbacks = list(value)
        if self._hooks is not None:
            self._hooks.callbacks = self._callbacks
        connect_module(self._callbacks, self.lightning_module)
        self._touch()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the current fit. An assignment during a batch takes effect at the next batch."""
        waiting = None if self._run_parts is None else self._run_parts.optimizers.waiting
        return self.strategy.optimizers if waiting is None else waiting

    @optimizers.setter
    def optimizers(self, value: Sequence[Optimizer]) -> None:
        optimizers, run = [unwrapped(optimizer) for optimizer in value], self._run_parts
        if run is not None and self.progress.loop_stage is RunningStage.TRAINING:
            run.optimizers.waiting = optimizers  # the running batch keeps its optimizers
            self._touch()
        else:
            self.engine.bind_optimizers(optimizers, self.lr_scheduler_configs)
            if run is not None:
                run.wrap_optimizers()

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """The schedulers of the current fit."""
        return self.strategy.lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, value: Sequence[LRSchedulerConfig]) -> None:
        self.strategy.lr_scheduler_configs = list(value)
        self._touch()

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint from which the current or last run began.

        If you assign a path, later runs without ``ckpt_path`` begin from this checkpoint, until you assign ``None``.
        """
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, value: str | Path | None) -> None:
        self._set_ckpt_path = value
        self._ckpt_path = None if value is None else str(value)

    scaler: Any = reads("strategy.precision_plugin.scaler", 'The gradient scaler of "16-mixed"; ``None`` otherwise.')

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of a DistributedSampler for this process; ``None`` with one process."""
        return self.strategy.distributed_sampler_kwargs if self.strategy.facts.is_distributed else None

    num_nodes: int = reads("plan.num_nodes", "The number of machines in the job.")

    @property
    def num_devices(self) -> int:
        """The number of devices on this machine."""
        return len(self.plan.devices)

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices on this machine."""
        return [device.index if device.index is not None else i for i, device in enumerate(self.plan.devices)]

    @property
    def loggers(self) -> list[Logger]:
        """The loggers."""
        return self._loggers

    @loggers.setter
    def loggers(self, value: Sequence[Logger] | None) -> None:
        self._loggers = list(value or [])
        if (run := self._run_parts) is not None:
            run.log = self._log if self._loggers else None
        self._touch()

    @property
    def logger(self) -> Logger | None:
        """The first logger; an assignment replaces all loggers."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, value: Logger | None) -> None:
        self.loggers = [] if value is None else [value]

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass ``metrics`` to every logger. If a metric is called "step", loggers get its value as the step."""
        given = dict(metrics)
        step = int(given.pop("step", step))
        if self.progress.stage is not RunningStage.SANITY_CHECKING and self.is_global_zero:
            telling.keep(self, given, step)
            given.setdefault("epoch", self.progress.current_epoch)
            with nullcontext() if self._profiler is None else self._profiler.profile("log_metrics"):
                # By keyword, because the order of parameters can differ between loggers.
                telling.tell(self, "log_metrics", metrics=given, step=step)

    @property
    def log_dir(self) -> str | None:
        """The first logger's folder for this run; without loggers, ``default_root_dir``."""
        if self.logger is None:
            return self.default_root_dir
        return self.logger.log_dir or self.logger.save_dir

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first callback that writes checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The EarlyStopping callbacks."""
        return self._callbacks_like("EarlyStopping")

    @property
    def goodput(self) -> float | None:
        """The fraction (0 to 1) of the wall time of all runs that was spent in training steps whose results were kept.
        ``None`` without a :class:`drivetrain.callbacks.GoodputMonitor`, or before it has recorded any time.
        """
        monitor = next(iter(self._callbacks_like("GoodputMonitor")), None)
        report = None if monitor is None else monitor.report(self)
        return None if report is None else report.goodput

    @property
    def time_spent(self) -> TimeSpent | None:
        """A report on the wall time of the running or last fit, with the reasons why the fit was slow. ``None`` before
        the first fit, and with ``barebones=True``. Each rank reports its own time. Rank 0 also compares the ranks. A
        strategy such as "ddp_fork" returns the report and :attr:`history` only if all started processes finish.
        """
        return self._time_spent if self._sampler is None else self._sampler.time_spent()

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar callback."""
        return next(iter(self._callbacks_like("ProgressBar")), None)

    def _callbacks_like(self, name: str) -> list[Any]:
        """Return the callbacks of drivetrain's class ``name``. The argument is a name, because an import of the class
        would be circular.
        """
        mros = [(each, type(each).__mro__) for each in self.callbacks]
        return [each for each, mro in mros if any(cls.__name__ == name and is_own_class(cls) for cls in mro)]

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """The latest value of every logged name, as tensors on the device of the logged value."""
        return self.logbook.refresh()

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """The latest value of every name logged with ``logger=True``, as tensors on the device of the logged value."""
        self.logbook.refresh()
        return self.logbook.logged_metrics

    history: History = reads("logbook.history", "The values that loggers get, by name, with their steps; on rank 0.")

    def plot(self, *names: str) -> Any:
        """Return a ``matplotlib.figure.Figure`` with the curves of :attr:`history`, training and validation together.

        Args:
            names: the names to draw; "loss" also draws "train_loss" and "val_loss". Without names: all.

        Raises:
            MissingPackageError: the package matplotlib is not installed.
            UnknownNameError: no value was logged under a name.
        """
        return figure_of(self.history, names)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest value of every name logged with ``prog_bar=True``, as floats. In the run's thread, reading this
        property waits for the device. Other threads get the values of the last flush.
        """
        return self.logbook.newest_bar_metrics()

    @property
    def current_epoch(self) -> int:
        """The index of the running epoch. In ``on_train_start``, this is the next epoch; after ``fit``, the number of
        finished epochs.
        """
        progress = self.progress
        return progress.epochs_done if progress.slot[0] == Phase.TRAIN_START else progress.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self.progress.global_step

    @property
    def logger_step(self) -> int:
        """The loggers' x axis: the index of the current or last window (the batches of one optimizer step)."""
        progress = self.progress
        before_step = progress.batch_idx == -1 or progress.batch_idx >= progress.batches_done
        closed = progress.epoch_ending or progress.between_epochs
        if progress.loop_stage is RunningStage.TRAINING and not closed and before_step:
            return progress.stepped_batches
        return progress.logger_step

    @property
    def is_logging_step(self) -> bool:
        """Whether the loggers get the values of the current training batch."""
        every = self.limits.log_every_n_steps
        return every > 0 and (self.logger_step + 1) % every == 0

    @property
    def should_stop(self) -> bool:
        """Assign True to end the run at the next batch after ``min_epochs`` and ``min_steps`` are reached."""
        return self.progress.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.progress.status is not TrainerStatus.RUNNING:
            rank_zero_warn(
                "trainer.should_stop = True has no effect before or after a run: each run begins with False. Set it in "
                "a hook of a run, or leave out the call of fit."
            )
        self.progress.ask_to_stop(value)

    is_last_batch: bool = reads(
        "progress.is_last_batch", "Whether the current training batch is the last of its epoch."
    )

    @property
    def num_training_batches(self) -> float:
        """The number of training batches in an epoch; ``inf`` if unknown, for example before the set-up of a fit.

        During set-up, for example in ``configure_optimizers``, reading this property creates the training loader if
        there is none yet. If the lengths of the ranks' loaders can differ, all ranks must read this property.
        """
        run, progress = self._run_parts, self.progress
        count = progress.num_training_batches
        if count or self.limits.train_batches == 0:
            return count
        if run is None or run.loaders.makes_training:
            return ENDLESS
        if progress.fn is TrainerFn.FITTING and not progress.stopped:
            return run.loaders.count_training()
        return ENDLESS if run.loaders.made_training is None else count

    num_val_batches: list[float] = _batch_counts("validate", "Validation batches of each loader.")
    num_test_batches: list[float] = _batch_counts("test", "Test batches of each loader.")
    num_predict_batches: list[float] = _batch_counts("predict", "Prediction batches of each loader.")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Number of batches of each validation loader in the sanity check."""
        return [min(count, self.limits.sanity_batches) for count in self.num_val_batches]

    def num_eval_batches(self, stage: str) -> list[float]:
        """Return the number of batches of each loader of "validate", "test" or "predict"; empty until the loaders
        exist.
        """
        if self._run_parts is None:
            return []
        return [source.num_batches for source in self._run_parts.loaders.made_evaluation.get(stage, [])]

    train_dataloader: Any = _made_loaders(
        "fit", "The training loader, or several in the nesting in which they were passed, once they exist."
    )
    val_dataloaders: Any = _made_loaders("validate", "The validation loaders, once they exist.")
    test_dataloaders: Any = _made_loaders("test", "The test loaders, once they exist.")
    predict_dataloaders: Any = _made_loaders("predict", "The prediction loaders, once they exist.")

    @property
    def enable_validation(self) -> bool:
        """Whether the fit validates."""
        return self._run_parts is not None and self._run_parts.validates()

    @property
    def why_not_validated(self) -> str:
        """A sentence with the reason why the fit does not validate, followed by a space; "" if the fit validates."""
        return "" if self._run_parts is None else self._run_parts.why_not_validated()

    validates_last = False
    """Whether a validation at the end of an epoch runs after ``on_train_epoch_end``. By default, it runs before this
    hook.
    """

    @property
    def judges_at_epoch_end(self) -> bool:
        """Whether callbacks check a monitored value at the end of a training epoch, and not after validation.

        This is so if the fit does not validate, or validates at the end of each epoch. All metrics are then known at
        that time.
        """
        interval = self.limits.val_check_interval
        # Only the float 1.0 means a complete epoch. The int 1 means a validation after each batch.
        whole_epoch = isinstance(interval, float) and interval == 1.0 and not self.validates_last
        return not self.enable_validation or (whole_epoch and self.limits.check_val_every_n_epoch == 1)

    @property
    def validation_follows(self) -> bool:
        """Whether a validation follows the training batch that has just ended."""
        run = self._run_parts
        return run is not None and run.progress.loop_stage is RunningStage.TRAINING and validation_follows(run)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps of the complete fit; ``inf`` if epochs and steps are unlimited. It is also
        ``inf`` before the first run, because the training loader is unknown.

        Reading this property creates the training loader if there is none yet. If the lengths of the ranks' loaders can
        differ, all ranks must read this property. In an evaluation, this is the number for the last fit.
        """
        run = self._run_parts
        if run is None and self.limits.max_steps == ENDLESS != self.limits.max_epochs:
            rank_zero_info(
                "trainer.estimated_stepping_batches is inf before the first run, which brings the loader. Read it in "
                "configure_optimizers: self.trainer.estimated_stepping_batches."
            )
        if run is None or self.limits.max_epochs == ENDLESS:
            return self.limits.max_steps
        fitted = 0 if run.progress.fn is TrainerFn.FITTING else run.progress.num_training_batches
        if not fitted and not run.loaders.available("fit"):
            return self.limits.max_steps
        batches = fitted or run.loaders.count_training()
        if batches == ENDLESS:
            return self.limits.max_steps
        epochs = range(int(self.limits.max_epochs))
        schedule = next(iter(self._callbacks_like("GradientAccumulationScheduler")), None)
        if schedule is None:
            steps = ceil(batches / self.limits.accumulate) * len(epochs)
        else:
            steps = sum(ceil(batches / schedule.get_accumulate_grad_batches(epoch)) for epoch in epochs)
        return min(steps, self.limits.max_steps)

    state: Progress = reads("progress", "The run's ``fn``, ``status`` and ``stage``, and its counters.")
    training: bool = _is_running(RunningStage.TRAINING, "Whether a training epoch is running.")
    validating: bool = _is_running(RunningStage.VALIDATING, "Whether validation is running; False in the sanity check.")
    testing: bool = _is_running(RunningStage.TESTING, "Whether testing is running.")
    predicting: bool = _is_running(RunningStage.PREDICTING, "Whether prediction is running.")
    sanity_checking: bool = _is_running(RunningStage.SANITY_CHECKING, "Whether the sanity check is running.")

    @property
    def evaluating(self) -> bool:
        """Whether validation, the sanity check or testing is running."""
        return self.progress.stage is not None and self.progress.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last run ended with an exception."""
        return self.progress.status is TrainerStatus.INTERRUPTED
