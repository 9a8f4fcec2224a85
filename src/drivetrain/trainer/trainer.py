"""The Trainer makes a plan from its arguments, and runs fits and evaluations according to this plan."""

from __future__ import annotations

import functools
import inspect
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import torch

from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.base.compiled import compiled_in_place, context_of
from drivetrain.base.files import spelled
from drivetrain.base.introspect import is_own_class, overrides
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.base.registry import load
from drivetrain.base.supplied import instead_of, supplied
from drivetrain.callback import Callback
from drivetrain.engine.engine import Engine
from drivetrain.engine.parts import listed as _listed
from drivetrain.errors import (
    ConfigurationError,
    MissingAttributeError,
    UnknownArgumentError,
    WrongTypeError,
    accepts_no_more,
    shown,
)
from drivetrain.launchers.launcher import in_notebook
from drivetrain.launchers.tracebacks import cut
from drivetrain.logbook.logbook import Logbook
from drivetrain.loops.evaluate import Predictions
from drivetrain.loops.progress import Progress, TrainerFn, TrainerStatus
from drivetrain.loops.run import Limits
from drivetrain.module.datamodule import LightningDataModule
from drivetrain.module.module import LightningModule
from drivetrain.module.optimizers import LRSchedulerConfig, normalise
from drivetrain.plan import resolve
from drivetrain.settings import PrecisionName, Settings, StrategyName, complete, documents_arguments
from drivetrain.strategies.strategy import Plugin, Strategy
from drivetrain.trainer.properties import TrainerView

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import Unpack

    from drivetrain.errors import NoMore
    from drivetrain.loggers.logger import Logger
    from drivetrain.profilers.profiler import Profiler

with on_first_use:
    from drivetrain.advice import error_notes, overlooked
    from drivetrain.base import configs, notebook
    from drivetrain.loops import stop
    from drivetrain.trainer import attach, checkpoint, compiling, last, life, precision_checks, stopping, switches
    from drivetrain.trainer import job as jobs
    from drivetrain.trainer import shown as told


P = ParamSpec("P")


def _completed(init: Callable[P, None]) -> Callable[P, None]:
    """Wrap ``init``. The wrapper adds arguments from environment variables, and checks the arguments' names."""

    @functools.wraps(init)
    def complete_and_init(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > 1:
            cure = "Write their names, max_epochs=3."
            if isinstance(args[1], LightningModule):
                cure = "Pass the model to trainer.fit(model) instead."
            raise UnknownArgumentError(f"Trainer({shown(args[1])}, ...): its arguments are keyword-only. {cure}")
        arguments: Any = complete(kwargs)
        values = (arguments.get("accelerator"), arguments.get("strategy"), *_listed(arguments.get("plugins")))
        if any(hasattr(value, "as_settings") for value in values):
            arguments = translated(arguments)
        init(*args, **arguments)

    return complete_and_init


@supplied
def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments. If an argument has a method ``as_settings()``, it is replaced by the arguments
    that this method returns.
    """
    return dict(arguments)


@documents_arguments
class Trainer(TrainerView):
    """Trains, validates and tests a LightningModule, and predicts with it.

    All arguments are keyword-only. Environment variables such as ``PL_TRAINER_MAX_EPOCHS=3`` set arguments that the
    program does not pass. The constructor decides, for example, which devices "auto" means on this machine.
    ``print(trainer.plan)`` shows these decisions.

    Raises:
        ConfigurationError: an argument is wrong, or contradicts another argument.
        NotSupportedError: an argument is valid, but this version does not support it.
    """

    _optimizers_made = False
    _resumed_by = 'trainer.fit(model, ckpt_path="last")'
    datamodule: LightningDataModule | None = None

    @_completed
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: StrategyName | Strategy = "auto",
        devices: int | list[int] | str = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | None = None,
        logger: Logger | Iterable[Logger | str] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        stop_timeout_s: float = 600.0,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        split_batches: bool = False,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Plugin | list[Plugin] | None = None,
        sync_batchnorm: bool = False,
        check_collectives: bool | None = None,
        stall_timeout_s: float | None = 300.0,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        compile: bool | str | type | list[str | type] | dict[str, Any] | None = None,
        split_on_oom: bool = False,
        cuda_graphs: bool | Literal["auto"] = False,
        optimizer_kernels: Literal["equal", "fastest"] | None = "equal",
        save_trainable_only: bool = False,
        sample_seeds: bool = False,
        replica_check_every: int | None = None,
        replay_every: int | None = None,
        plan_check: Literal["warn"] | None = None,
    ) -> None:
        self.settings = Settings(**configs.without_configs({k: v for k, v in locals().items() if k != "self"}))
        plan = resolve(self.settings)
        if (verbs := plan.strategy_class.facts.engine_verbs) is not None:
            verbs.refuse_trainer(plan.strategy_class)
        self.limits, self.progress = Limits.of(self.settings), Progress()
        self.default_root_dir = spelled(self.settings.default_root_dir or Path.cwd())
        # The callbacks are checked before the engine is built, because the engine changes the caller's strategy.
        self._callbacks: list[Callback] = attach.callbacks_of(self.settings, plan.environment)
        self._loggers: list[Logger] = attach.loggers_of(self.settings, plan, self.default_root_dir)
        self._profiler, self.predictions = attach.profiler_of(self.settings), Predictions()
        self.engine = Engine(plan=plan, check_collectives=self.settings.check_collectives)
        self.engine.stall_timeout_s = None  # the Trainer starts a watching process for each run
        self.engine.launcher.stop_timeout_s = self.settings.stop_timeout_s
        self.logbook = Logbook(torch.float64 if self.accelerator.supports_float64 else torch.float32)
        self._failed_loggers, self.ranks_of_job = list[Any](), list[dict[str, Any]]()  # see Outcome.ranks
        # digests of the newest fit's program. This attribute is set last, because ``__setattr__`` then begins to warn
        # of unknown names.
        self._program: dict[str, str] = {}

    # ---- entry points --------------------------------------------------------------------------------------------

    @accepts_no_more
    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        **unknown: Unpack[NoMore],
    ) -> None:
        """Train ``model``.

        Args:
            model: the module to train.
            train_dataloaders: the training loader, or a list or dictionary of loaders; a list of batches is one loader.
                ``None``: the datamodule's loaders; without a datamodule, the model's loaders.
            val_dataloaders: the validation loader or a list of loaders; ``None``: as for the training loader.
            datamodule: the source of the data, instead of loaders.
            ckpt_path: the checkpoint to resume from: a path, or "best" or "last" for the best or newest checkpoint of
                ModelCheckpoint.
            weights_only: ``None`` or True reads the checkpoint as plain data, and runs no code. False unpickles the
                checkpoint, and this can run any code. Pass False only for files that you trust.

        Raises:
            ConfigurationError: an argument is missing, or two arguments contradict each other. Raised before the run
                begins.
            SystemExit: after Ctrl-C (code 130) or SIGTERM (code 143, a SIGTERMException). Raised after the final save
                and the clean-up. In a notebook, Ctrl-C raises KeyboardInterrupt instead.
        """
        passed = {"fit": train_dataloaders, "validate": val_dataloaders}
        self.run_job(self._job(TrainerFn.FITTING, model, passed, datamodule, ckpt_path, weights_only, unknown))

        last.finished_fits += 1

    @accepts_no_more
    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
        **unknown: Unpack[NoMore],
    ) -> list[dict[str, float]]:
        """Run one pass over the validation loaders, without gradients.

        Args:
            model: the module to evaluate; ``None``: the model of the last run, with the weights of the best checkpoint.
            dataloaders: the loader or a list of loaders; ``None``: the datamodule's loaders; without a datamodule, the
                model's loaders.
            ckpt_path: a checkpoint whose weights are loaded into the model before the evaluation.
            verbose: print the metrics.
            datamodule: the source of the data, instead of loaders.
            weights_only: as in :meth:`fit`.

        Returns:
            One dictionary of metrics per loader.
        """
        passed = {"validate": dataloaders}
        job = self._job(TrainerFn.VALIDATING, model, passed, datamodule, ckpt_path, weights_only, unknown)
        return self._run_and_show(job, verbose)

    @accepts_no_more
    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
        **unknown: Unpack[NoMore],
    ) -> list[dict[str, float]]:
        """Run one pass over the test loaders, with the arguments of :meth:`validate`."""
        passed = {"test": dataloaders}
        job = self._job(TrainerFn.TESTING, model, passed, datamodule, ckpt_path, weights_only, unknown)
        return self._run_and_show(job, verbose)

    @accepts_no_more
    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        **unknown: Unpack[NoMore],
    ) -> list[Any]:
        """Return the output of ``predict_step`` for every batch, in host memory.

        Args:
            model: the module that predicts; ``None``: the model of the last run, with the weights of the best
                checkpoint.
            dataloaders: the loader or a list of loaders; ``None``: the datamodule's loaders; without a datamodule, the
                model's loaders.
            datamodule: the source of the data, instead of loaders.
            return_predictions: whether to keep the predictions. Pass False if a callback writes the predictions to
                files.
            ckpt_path, weights_only: as in :meth:`validate`.

        Returns:
            One output per batch; with several loaders, one list of outputs per loader. Empty with
            ``return_predictions=False``.
        """
        passed = {"predict": dataloaders}
        job = self._job(TrainerFn.PREDICTING, model, passed, datamodule, ckpt_path, weights_only, unknown)
        self.predictions = Predictions(keeps=return_predictions is not False)
        return self.run_job(job)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        storage_options: Any = None,
        allow_pickle: bool = False,
    ) -> None:
        """Write the state of the run to ``filepath``. Every rank must call this method.

        When this method returns, the checkpoint is completely written. A CheckpointIO that writes in the background is
        an exception: during a run, call ``trainer.strategy.checkpoint_io.wait(filepath)`` to wait for the end of the
        write.

        Args:
            filepath: the path. An old file at this path stays until the new file is complete.
            weights_only: leave out the state that only a resumed fit needs.
            storage_options: options for the CheckpointIO.
            allow_pickle: pickle objects that are not plain data. A file with pickled objects can be loaded only with
                ``weights_only=False``, which can run code.

        Raises:
            ConfigurationError: there is no model, because no run has begun.
            CheckpointError: the file could not be written, or a value cannot be stored as plain data.
        """
        if self.lightning_module is None:
            raise MissingAttributeError("There is no model to save yet. Call trainer.fit(model) first.")
        life.save(self, filepath, weights_only, storage_options, allow_pickle)

    def make_optimizers(self) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
        """Return the result of ``configure_optimizers`` as lists, for :meth:`Strategy.setup_optimizers`."""
        self._optimizers_made = True
        returned = self.hooks.call_method("configure_optimizers")
        return normalise(returned, by_hand=not self.lightning_module.automatic_optimization)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Context in which new layers are created on the Trainer's device, in the Trainer's precision.

        Args:
            empty_init: leave parameters uninitialized, because a checkpoint will be loaded; ``None``: False.
        """
        return self.engine.init_module(empty_init)

    # ---- a run ---------------------------------------------------------------------------------------------------

    def _run_and_show(self, job: jobs.Job, verbose: bool) -> list[dict[str, float]]:
        results = self.run_job(job)
        if verbose:
            load("drivetrain.trainer.telling:show")(self, job.fn.value, results)
        return results

    def _passed_or_set(self, fn: TrainerFn, ckpt_path: str | Path | None) -> str | Path | None:
        """Return ``ckpt_path``. If it is ``None``, return the value that user code has assigned to
        ``trainer.ckpt_path``.
        """
        if ckpt_path is not None and self._set_ckpt_path is not None:
            rank_zero_warn(
                f"trainer.{fn.value} was passed ckpt_path={str(ckpt_path)!r}, and trainer.ckpt_path was set to "
                f"{str(self._set_ckpt_path)!r}, which is dropped. Set or pass one of them."
            )
            self._set_ckpt_path = None
        return self._set_ckpt_path if ckpt_path is None else ckpt_path

    def _job(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        passed: dict[str, Any],
        datamodule: LightningDataModule | None,
        ckpt_path: str | Path | None,
        weights_only: bool | None,
        unknown: Mapping[str, Any] | None = None,
    ) -> jobs.Job:
        """Check the arguments of ``fit``, ``validate``, ``test`` or ``predict``, and return the job.

        Without a ``model``, an evaluation uses the model of the last run, with the weights of the best checkpoint.
        """
        if unknown:
            raise overlooked.unknown_of(fn, unknown, list(inspect.signature(getattr(Trainer, fn.value)).parameters)[1:])
        if model is None and fn is not TrainerFn.FITTING:
            model = self.lightning_module
            if model is None:
                raise WrongTypeError(
                    f"trainer.{fn.value}() has no model, and none was run before. Write trainer.{fn.value}(model)."
                )
            best: str = getattr(self.checkpoint_callback, "best_model_path", "")
            if ckpt_path is None and self._set_ckpt_path is None and best:
                ckpt_path = "best"
        model = compiled_in_place(model)
        ckpt_path = self._passed_or_set(fn, ckpt_path)
        first = next(iter(passed))
        if isinstance(passed[first], LightningDataModule):
            passed, datamodule = {**passed, first: None}, passed[first]
        attach.check_passed(model, fn, passed, datamodule)
        attach.check_module(model, fn, self.settings, self.strategy)
        attach.check_hooks([model, datamodule, *self.callbacks], self.strategy.facts.earlier.hooks)
        if fn is TrainerFn.FITTING:
            overlooked.warn_of_the_overlooked(model, self.settings)
            if ckpt_path is None:  # with a checkpoint, the callbacks' states would be replaced
                overlooked.warn_of_used_callbacks(self, model, Callback)
                overlooked.tell_of_used_trainer(self, model)
        if not is_own_class(type(precision := self.strategy.precision_plugin)):
            precision_checks.check_precision(precision, [model, *self.callbacks], fn, self.settings)
        if fn is TrainerFn.FITTING or not self._program:
            self._program = last.program_of(self, model, datamodule)
        checkpoint_path = checkpoint.resolve_path(self, ckpt_path, fitting=fn is TrainerFn.FITTING)
        compiled_by = context_of(model)
        if compiled_by is not None or self.settings.compile:
            compiled_by = compiling.check(self, model, compiled_by)
        return jobs.Job(fn, model, passed, datamodule, checkpoint_path, weights_only, compiled_by)

    def run_job(self, job: jobs.Job) -> list[Any]:
        """Run ``job`` in this process, or in new processes. After an exception, clean up and raise the exception
        again.
        """
        if self.progress.status is TrainerStatus.RUNNING and self.progress.fn and self._run_parts is not None:
            raise ConfigurationError(
                f"trainer.{job.fn.value} was called while trainer.{self.progress.fn.value} runs, and would overwrite "
                "its metrics and its place in the data. Use a second Trainer for it, or val_check_interval."
            )

        results: list[Any] = []
        again: jobs.Job | None = None
        # a SIGTERM must also raise inside the ``except`` clauses
        with stop.sigterm_raises(self.engine.launcher.is_external):
            try:
                if not self.engine.launcher.is_external:
                    results = jobs.run_elsewhere(self, job, functools.partial(life.connect, self))
                else:
                    fits = job.fn is TrainerFn.FITTING
                    saves = fits and any(each.saves_on_exception for each in self.checkpoint_callbacks)
                    several = self.world_size > 1
                    with (
                        told.shown(self.progress, saves, several, self.strategy.explain),
                        switches.torch_switches(self.settings, training=fits),
                    ):
                        run = life.set_up(self, job, life.connect(self, job))
                        loop = life.loop_of(self, job.fn, run)
                        wraps = overrides(self.strategy, "run", Strategy)
                        with stopping.stoppable(self, run) if fits else nullcontext():
                            results = (self.strategy.run(loop) if wraps else loop()) or []
                        life.tear_down(self, job.fn)
            except KeyboardInterrupt as interrupt:
                rank_zero_info("Interrupted: cleaning up.")
                life.abort(self, interrupt)
                if in_notebook():  # a notebook would show ten lines of source for each frame
                    raise interrupt.with_traceback(None) from None
                raise SystemExit(128 + signal.SIGINT) from interrupt
            except BaseException as error:
                error_notes.note_place(error, self.progress, self.strategy.global_rank, self._run_parts)
                life.abort(self, error)
                if (again := jobs.resumed(self, job, error)) is None:
                    if in_notebook():
                        raise error.with_traceback(cut(error))  # noqa: B904  # it is the same exception
                    raise
        if again is not None:
            return Trainer.run_job(self, again)
        self.progress.end_run()
        return results

    if not TYPE_CHECKING:  # otherwise a type checker would accept every attribute

        def __getattr__(self, name):
            if (cure := instead_of("trainer", name)) is not None:
                raise MissingAttributeError(f"A Trainer has no attribute {name!r}. {cure}")
            return object.__getattribute__(self, name)  # raises the usual AttributeError

    def __setattr__(self, name: str, value: Any) -> None:
        # If a new attribute is set after the constructor, its name may be misspelt.
        own = self.__dict__
        if name not in own and "_program" in own and not hasattr(type(self), name):
            overlooked.warn_of_attribute(
                self, name, (each for each in (*dir(type(self)), *own) if not each.startswith("_"))
            )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return repr(self.settings).replace("Settings", type(self).__name__, 1)

    def _repr_html_(self) -> str:
        return notebook.table([(repr(self),)]) + self.plan._repr_html_()

    def __getstate__(self) -> dict[str, Any]:
        # a Trainer that is unpickled in another process has no run
        return {**self.__dict__, "_run_parts": None, "_hooks": None}
