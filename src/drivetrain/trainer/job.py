"""Run a job in processes of its own: what they get, and what returns to the launching process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides
from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.base.tree import move
from drivetrain.engine.wrappers import follow
from drivetrain.errors import CheckpointError, ConfigurationError, described
from drivetrain.loops.progress import Progress, TrainerFn
from drivetrain.module.module import LightningModule
from drivetrain.module.optimizers import LRSchedulerConfig

if TYPE_CHECKING:
    from drivetrain.module.datamodule import LightningDataModule
    from drivetrain.trainer.trainer import Trainer


@dataclass
class Job:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``.

    Attributes:
        fn: which.
        model: the user's module.
        passed: loaders by stage, as they were passed.
        datamodule: the user's datamodule.
        ckpt_path: the file to begin from.
        weights_only: how it is read.
        compiled_by: the context of the model that torch.compile returned, if it was passed; it is not pickled with it.
        checked: the launching process has checked the combination already.
    """

    fn: TrainerFn
    model: LightningModule
    passed: Mapping[str, Any]
    datamodule: LightningDataModule | None
    ckpt_path: str | None
    weights_only: bool | None
    compiled_by: Any = None
    checked: bool = False


@dataclass
class Outcome:
    """What returns to the launching process, so that it can continue, save, or fit again as if it had trained.

    Weights, optimizers, schedulers, counters, metrics, results, the random state of rank 0, and the states of callbacks
    and datamodule come back. Other attributes that user code sets on its objects stay in the process that set them.

    Attributes:
        results: what the entry point returns.
        parameters: of the module, by name: those that ``optimizers`` step.
        buffers: also those that no state dict holds.
        weights: the module's state dict.
        schedulers: one that cannot be pickled, because of a lambda for example, is its :class:`Remains`.
        callbacks: each one's key and state, in their order.
        ranks: of a fit that has ended inside an epoch, what each rank needs to resume it.
    """

    results: list[Any]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    weights: dict[str, Any]
    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]
    progress: Progress
    metrics: tuple[dict[str, Any], dict[str, float], dict[str, Any]]
    callbacks: list[tuple[str, dict[str, Any]]]
    datamodule: dict[str, Any]
    precision: dict[str, Any]
    rng: dict[str, Any]
    ranks: list[dict[str, Any]]

    @classmethod
    def of(cls, trainer: Trainer, results: list[Any]) -> Outcome:
        """Return what is left of the run that ``trainer`` has just ended; every rank must call it."""
        from drivetrain.strategies.sharded_state import whole_parameters, whole_state
        from drivetrain.trainer.rank_parts import inside_an_epoch

        ranks = inside_an_epoch(trainer.current_run, trainer.strategy)
        strategy, module, book = trainer.strategy, trainer.lightning_module, trainer.logbook
        schedulers = strategy.lr_scheduler_configs
        for config in schedulers:
            config.scheduler = config.scheduler if _travels(config.scheduler) else Remains(config.scheduler)
        weights = whole_state(strategy.lightning_module_state_dict())
        whole = [strategy.whole_optimizer(optimizer) for optimizer in strategy.optimizers]
        parameters, optimizers = whole_parameters(dict(module.named_parameters()), whole)
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
            ),
            callbacks=[(callback.state_key, whole_state(callback.state_dict())) for callback in trainer.callbacks],
            datamodule={} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            precision=whole_state(strategy.precision_plugin.state_dict(module, strategy.optimizers)),
            rng={name: state for name, state in rng_state().items() if name != "device"},  # which is not used here
            ranks=ranks,
        )

    def restore_into(self, trainer: Trainer) -> None:
        """Restore the run's results into ``trainer`` and the user's objects that it holds."""
        module, strategy, book = trainer.lightning_module, trainer.strategy, trainer.logbook
        with _one_thread():
            strategy.precision_plugin.convert_module(module)
            if self._missing_in(module) and overrides(module, "configure_model", LightningModule):
                module.configure_model()
            self._fill(module)
            follow(self.optimizers, self.parameters, module)
        set_rng_state(self.rng)  # the next run draws on, as it does where one process does both
        if self.progress.fn is TrainerFn.FITTING:  # the others have none, and change none
            trainer.engine.bind_optimizers(self.optimizers, self.schedulers)
        strategy.precision_plugin.load_state_dict(self.precision, module, strategy.optimizers)
        trainer.progress.take_over(self.progress)
        trainer.ranks_of_job = self.ranks
        book.restore_results(*self.metrics)
        states = list(self.callbacks)
        for callback in trainer.callbacks:
            found = next((pair for pair in states if pair[0] == callback.state_key), None)
            if found is not None:
                states.remove(found)
                if found[1]:
                    callback.load_state_dict(found[1])
        if trainer.datamodule is not None and self.datamodule:
            trainer.datamodule.load_state_dict(self.datamodule)

    def _missing_in(self, module: nn.Module) -> bool:
        """Return whether ``module`` is without something that was trained, or has it in another shape."""
        there: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        trained = {**self.parameters, **self.buffers}
        return any(name not in there or there[name].shape != value.shape for name, value in trained.items())

    def _fill(self, module: nn.Module) -> None:
        """Copy the values; a state dict, which user code may have made smaller, only where they do not fit as they are.

        Raises:
            CheckpointError: that does not fit either.
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
    """Start processes that run ``job``, restore what they return into ``trainer``, and return the results.

    Args:
        trainer: of this process.
        job: what is to be done.
        attach: makes the trainer ready for it, with all checks that need no device.

    Raises:
        ConfigurationError: something cannot travel to another process, or a launcher of the user's returns something
            else than the function that it launched.
        LaunchError: a process failed.
    """
    if trainer.engine.launcher.reruns_program:
        for logger in trainer.loggers:
            logger.leave_run()
        trainer.engine.launch()  # which does not return: each process comes here by itself, and this one is no rank
    attach(job)
    for logger in trainer.loggers:
        _ = logger.version  # chosen before the processes start, so that all of them write to the same run
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
    """Stands in for a learning-rate scheduler that cannot be pickled: it keeps the state, for a checkpoint.

    Args:
        scheduler: which holds what no other process can have.
    """

    def __init__(self, scheduler: Any) -> None:
        self._state = scheduler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """As the scheduler's."""
        state: dict[str, Any] = self._state
        return state


def _travels(scheduler: Any) -> bool:
    """Return whether it can be pickled; its optimizer can."""
    try:
        pickle.dumps({name: value for name, value in vars(scheduler).items() if name != "optimizer"})
    except (pickle.PickleError, AttributeError, TypeError):
        return False
    return True


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context whose torch operations start no threads: the next run may copy this process, and copies have none."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
