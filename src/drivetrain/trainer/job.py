"""Runs a job in separate processes, and restores the results in the launching process."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.tree import move
from drivetrain.engine.wrappers import follow
from drivetrain.errors import CheckpointError, ConfigurationError, described
from drivetrain.logbook.history import History
from drivetrain.loops.progress import Progress, TrainerFn
from drivetrain.module.module import LightningModule
from drivetrain.module.optimizers import LRSchedulerConfig
from drivetrain.strategies.sharded_state import whole_parameters, whole_state
from drivetrain.trainer import rank_parts

if TYPE_CHECKING:
    from drivetrain.advice.time_spent import TimeSpent
    from drivetrain.module.datamodule import LightningDataModule
    from drivetrain.trainer.trainer import Trainer


@dataclass
class Job:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``.

    Attributes:
        fn: the method that was called.
        model: the user's module.
        passed: the caller's loaders, by stage.
        datamodule: the user's datamodule.
        ckpt_path: the checkpoint from which to begin.
        weights_only: the argument ``weights_only`` of ``Trainer.fit``.
        compiled_by: the context of ``torch.compile``, if the program passed a compiled model; not pickled with the job.
        checked: whether the launching process has already checked the arguments.
    """

    fn: TrainerFn
    model: LightningModule
    passed: Mapping[str, Any]
    datamodule: LightningDataModule | None
    ckpt_path: str | None
    weights_only: bool | None
    compiled_by: Any = None
    checked: bool = False


def resumed(trainer: Trainer, job: Job, error: BaseException) -> Job | None:
    """Return a job that resumes ``job`` from the checkpoint ``error.resume_from``; ``None`` if ``error`` has no such
    attribute.

    All ranks must have raised ``error`` before this call.
    """
    path = getattr(error, "resume_from", None)
    # if this process has only launched others, those resume the job themselves
    if path is None or not trainer.engine.launcher.is_external:
        return None
    rank_zero_warn(f"{error} Training resumes from {path}.")
    return replace(job, ckpt_path=path)


@dataclass
class Outcome:
    """The results of a run in other processes.

    The launching process restores these results, and can then save a checkpoint or call ``fit`` again.

    Attributes that user code sets on objects in the started processes are not included.

    Attributes:
        results: the return value of ``fit``, ``validate``, ``test`` or ``predict``.
        parameters: the module's parameters by name; ``optimizers`` refers to these tensors.
        buffers: all buffers, including non-persistent buffers.
        weights: the module's state dict.
        schedulers: the schedulers. A scheduler that cannot be pickled, for example because of a lambda, is replaced by
            a :class:`Remains`.
        callbacks: the states of the callbacks, by ``state_key``.
        ranks: each rank's state if the fit ended inside an epoch. A later fit can resume from these states.
        time_spent: rank 0's report on the time of the last fit.
    """

    results: list[Any]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    weights: dict[str, Any]
    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]
    progress: Progress
    metrics: tuple[dict[str, Any], dict[str, float], dict[str, Any], History]
    callbacks: dict[str, dict[str, Any]]
    datamodule: dict[str, Any]
    precision: dict[str, Any]
    rng: dict[str, Any]
    ranks: list[dict[str, Any]]
    time_spent: TimeSpent | None

    @classmethod
    def of(cls, trainer: Trainer, results: list[Any]) -> Outcome:
        """Return the results of the run that ``trainer`` has just ended. Every rank must call this method."""
        ranks = rank_parts.of_ended_fit(trainer.current_run, trainer.strategy)
        strategy, module, book = trainer.strategy, trainer.lightning_module, trainer.logbook
        schedulers = strategy.lr_scheduler_configs
        for config in schedulers:
            config.scheduler = config.scheduler if _travels(config.scheduler) else Remains(config.scheduler)
        weights = whole_state(strategy.lightning_module_state_dict())
        whole = [strategy.whole_optimizer(optimizer) for optimizer in strategy.optimizers]
        parameters, optimizers = whole_parameters(dict(module.named_parameters()), whole)
        states = ((each.state_key, whole_state(each.state_dict())) for each in trainer.callbacks)
        return cls(
            results=results,
            parameters=parameters,
            buffers=dict(module.named_buffers()),
            weights=weights,
            optimizers=optimizers,
            schedulers=schedulers,
            progress=trainer.progress,
            metrics=(
                move(trainer.callback_metrics, torch.device("cpu")),
                book.bar_metrics,
                move(book.logged_metrics, torch.device("cpu")),
                book.history,
            ),
            callbacks={key: state for key, state in states if state},
            datamodule={} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            precision=whole_state(strategy.precision_plugin.state_dict(module, strategy.optimizers)),
            # The launching process does not use the device.
            rng={name: state for name, state in rng_state().items() if name != "device"},
            ranks=ranks,
            time_spent=trainer.time_spent,
        )

    def restore_into(self, trainer: Trainer) -> None:
        """Restore the run's results into ``trainer``, the module, the datamodule and the callbacks."""
        module, strategy, book = trainer.lightning_module, trainer.strategy, trainer.logbook
        with ExitStack() as threads:
            # torch must not start threads here, because a fork of this process for the next run would lack them.
            threads.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            strategy.precision_plugin.convert_module(module)
            if self._missing_in(module) and overrides(module, "configure_model", LightningModule):
                module.configure_model()
            self._fill(module)
            follow(self.optimizers, self.parameters, module)
        set_rng_state(self.rng)  # the next run continues the random sequence of the job
        if self.progress.fn is TrainerFn.FITTING:  # only a fit has optimizers
            trainer.engine.bind_optimizers(self.optimizers, self.schedulers)
        strategy.precision_plugin.load_state_dict(self.precision, module, strategy.optimizers)
        trainer.progress.take_over(self.progress)
        trainer.ranks_of_job, trainer._time_spent = self.ranks, self.time_spent
        book.restore_results(*self.metrics)
        for callback in trainer.callbacks:
            if state := self.callbacks.get(callback.state_key):
                callback.load_state_dict(state)
        if trainer.datamodule is not None and self.datamodule:
            trainer.datamodule.load_state_dict(self.datamodule)

    def _missing_in(self, module: nn.Module) -> bool:
        """Return whether a trained parameter or buffer is missing in ``module``, or has another shape in ``module``."""
        there: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        trained = {**self.parameters, **self.buffers}
        return any(name not in there or there[name].shape != value.shape for name, value in trained.items())

    def _fill(self, module: nn.Module) -> None:
        """Copy the trained values into ``module`` by name. If a name or a shape differs, load the state dict first.

        Raises:
            CheckpointError: the state dict does not fit ``module``.
        """
        if self._missing_in(module) or any(name.endswith("_extra_state") for name in self.weights):
            try:
                module.load_state_dict(self.weights, strict=getattr(module, "strict_loading", None) in (None, True))
            except RuntimeError as error:
                raise CheckpointError(
                    f"The weights that {type(module).__name__} has after its run do not fit the object that was passed "
                    f"to the Trainer: {error} Make all layers in its constructor or in configure_model."
                ) from error
        values: dict[str, torch.Tensor] = {**self.parameters, **self.buffers}
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name in values:
                    tensor.copy_(values[name])


def run_elsewhere(trainer: Trainer, job: Job, attach: Callable[[Job], Any]) -> list[Any]:
    """Start processes that run ``job``. Restore the job's results into ``trainer``, and return the result of ``fit``,
    ``validate``, ``test`` or ``predict``.

    Args:
        trainer: the Trainer of this process.
        job: the job to run.
        attach: a function that attaches the job to the Trainer, with all checks that do not need a device.

    Raises:
        ConfigurationError: an object cannot be sent to another process, or the user's launcher does not return the
            result of the launched function.
        LaunchError: a process failed.
    """
    trainer._launch = uuid.uuid4().hex[:12]
    if trainer.engine.launcher.reruns_program:
        for logger in trainer.loggers:
            logger.leave_run()
        # This call does not return, because the launcher runs the program again in each process.
        trainer.engine.launch()
    attach(job)
    for logger in trainer.loggers:
        _ = logger.version  # a read of ``version`` chooses the version, before the processes start
    outcome = trainer.engine.start(_work, trainer, replace(job, checked=True))
    if not isinstance(outcome, Outcome):
        raise ConfigurationError(
            f"{type(trainer.engine.launcher).__name__}.launch returned {described(outcome)}. It must return what its "
            "function returned in the first process of this machine."
        )
    outcome.restore_into(trainer)
    return outcome.results


def _work(trainer: Trainer, job: Job) -> Outcome:
    return Outcome.of(trainer, trainer.run_job(job))


class Remains:
    """Replaces a learning-rate scheduler that cannot be pickled, and keeps the scheduler's state for checkpoints.

    Args:
        scheduler: a scheduler with objects that cannot be pickled.
    """

    def __init__(self, scheduler: Any) -> None:
        self._state = scheduler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return self._state


def _travels(scheduler: Any) -> bool:
    """Return whether ``scheduler`` can be pickled without its optimizer."""
    try:
        pickle.dumps({name: value for name, value in vars(scheduler).items() if name != "optimizer"})
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True
