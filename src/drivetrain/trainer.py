"""The Trainer: settings in, a plan, and the loops run over it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from drivetrain import attach, checkpoint
from drivetrain.accelerators.accelerator import Accelerator
from drivetrain.callback import Callback
from drivetrain.datamodule import LightningDataModule
from drivetrain.engine import Engine
from drivetrain.errors import CheckpointError, ConfigurationError, NotSupportedError
from drivetrain.hooks import DataHooks, HookTable, bind_transfer, overrides
from drivetrain.logbook import Logbook
from drivetrain.loops.evaluate import Stage, evaluate
from drivetrain.loops.fit import fit
from drivetrain.loops.loaders import Loaders
from drivetrain.loops.progress import Progress, RunningStage, TrainerFn, TrainerStatus
from drivetrain.loops.run import Limits, Run
from drivetrain.module import LightningModule
from drivetrain.optimizers import normalise
from drivetrain.plan import Plan, resolve
from drivetrain.rank_zero import rank_zero_info, rank_zero_warn
from drivetrain.settings import Settings
from drivetrain.strategies.strategy import Strategy
from drivetrain.view import TrainerView

if TYPE_CHECKING:
    from drivetrain.loggers.logger import Logger


class Trainer(TrainerView):
    """Trains, validates and tests a LightningModule.

    Every argument is described in :class:`drivetrain.settings.Settings`; all are keyword-only. What they mean on this
    machine is decided here, at once, and can be read: ``print(trainer.plan)``.

    Raises:
        ConfigurationError: an argument is wrong or contradicts another; nothing was built.
        NotSupportedError: a legal argument that this version cannot honour.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: int | str | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
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
        profiler: Any | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any | list[Any] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.settings = Settings(**arguments)
        self.plan: Plan = resolve(self.settings)
        self.limits = Limits.of(self.settings)
        self.progress = Progress()
        self.engine = Engine(plan=self.plan)
        self.logbook = Logbook(torch.float64 if self.accelerator.supports_float64 else torch.float32)
        self.default_root_dir = os.path.expanduser(self.settings.default_root_dir or Path.cwd())
        self.callbacks: list[Callback] = attach.callbacks_of(self.settings)
        self.loggers: list[Logger] = attach.loggers_of(self.settings, self.plan, self.default_root_dir)
        self.datamodule: LightningDataModule | None = None
        self.ckpt_path: str | None = None
        self._run_parts: Run | None = None
        self._hooks: HookTable | None = None
        self._plan_shown = False

    # ---- entry points --------------------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train ``model``.

        Args:
            model: what to train.
            train_dataloaders: the training loader; ``None`` asks the datamodule, then the model.
            val_dataloaders: the validation loader or a list of them; likewise.
            datamodule: where the data comes from, instead of loaders.
            ckpt_path: resume from this checkpoint ("best" and "last" name those of the ModelCheckpoint).
            weights_only: ``None`` or True: a checkpoint is read as plain data, never unpickled as code.

        Raises:
            ConfigurationError: something is missing or contradicts itself; nothing has run yet.
            SystemExit: with code 1 after Ctrl-C, when everything is cleaned up.
        """
        passed = {"fit": train_dataloaders, "validate": val_dataloaders}
        self._run(TrainerFn.FITTING, model, passed, datamodule, ckpt_path, weights_only)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """One pass over the validation loaders, without gradients.

        Args:
            model: what to judge; ``None``: the one of the last run, with its best checkpoint.
            dataloaders: the loader or a list of them; ``None`` asks the datamodule, then the model.
            ckpt_path: weights to judge instead of the model's own.
            verbose: print the metrics.
            datamodule: where the data comes from, instead of loaders.
            weights_only: as in :meth:`fit`.

        Returns:
            One dictionary of metrics per loader.
        """
        return self._evaluate(TrainerFn.VALIDATING, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """One pass over the test loaders; otherwise as :meth:`validate`."""
        return self._evaluate(TrainerFn.TESTING, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write the state of the run to ``filepath``; when this returns, it is durable. Call it on every rank.

        Raises:
            ConfigurationError: no model has been attached by a run.
        """
        if self.lightning_module is None:
            raise ConfigurationError("There is no model to save yet. Call trainer.fit(model) first.")
        self.strategy.save_checkpoint(checkpoint.dump(self, weights_only), filepath, storage_options)
        self.strategy.barrier("save_checkpoint")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on global rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    # ---- a run ---------------------------------------------------------------------------------------------------

    def _evaluate(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        dataloaders: Any,
        ckpt_path: str | Path | None,
        verbose: bool,
        datamodule: LightningDataModule | None,
        weights_only: bool | None,
    ) -> list[dict[str, float]]:
        if model is None:
            if self.lightning_module is None:
                raise ConfigurationError(
                    f"trainer.{fn.value}() has no model, and none was run before. Write trainer.{fn.value}(model)."
                )
            model = self.lightning_module
            if ckpt_path is None and self._best_path():
                ckpt_path = "best"
        results = self._run(fn, model, {fn.value: dataloaders}, datamodule, ckpt_path, weights_only)
        if verbose:
            self.print(_results_table(fn.value, results))
        return results

    def _run(
        self,
        fn: TrainerFn,
        model: LightningModule,
        passed: dict[str, Any],
        datamodule: LightningDataModule | None,
        ckpt_path: str | Path | None,
        weights_only: bool | None,
    ) -> list[dict[str, float]]:
        """Set up, run the loop of ``fn``, tear down; clean up and re-raise on any exception."""
        results: list[dict[str, float]] = []
        first = next(iter(passed))
        if isinstance(passed[first], LightningDataModule):
            passed, datamodule = {**passed, first: None}, passed[first]
        if datamodule is not None and any(loaders is not None for loaders in passed.values()):
            raise ConfigurationError(
                f"trainer.{fn.value} got both loaders and a datamodule. Pass the loaders, or datamodule=, not both."
            )
        attach.check_module(model, fn)
        checkpoint_path = self._resolve_ckpt_path(ckpt_path, weights_only)
        try:
            with self._torch_flags(fn):
                run = self._set_up(fn, model, passed, datamodule, checkpoint_path)
                if fn is TrainerFn.FITTING:
                    fit(run)
                else:
                    stage: Stage = "validate" if fn is TrainerFn.VALIDATING else "test"
                    results = evaluate(run, stage, run.loaders.evaluation(stage))
                self._tear_down(fn)
        except KeyboardInterrupt as interrupt:
            rank_zero_info("Interrupted: cleaning up.")
            self._abort(interrupt)
            raise SystemExit(1) from interrupt
        except BaseException as error:
            self._abort(error)
            raise
        self.progress.status = TrainerStatus.FINISHED
        self.progress.stage = None
        return results

    def _set_up(
        self,
        fn: TrainerFn,
        model: LightningModule,
        passed: Mapping[str, Any],
        datamodule: LightningDataModule | None,
        ckpt_path: str | None,
    ) -> Run:
        """Everything before the first loop, in the order of spec 3.3."""
        progress, strategy, stage = self.progress, self.strategy, fn.value
        progress.begin_run(fn)
        self.datamodule, self.ckpt_path = datamodule, ckpt_path
        self._run_parts = None
        self.logbook.start_run()
        if fn is TrainerFn.FITTING or strategy.lightning_module is not model:
            strategy.optimizers, strategy.lr_scheduler_configs = [], []
        strategy.connect(model)
        model.trainer = self
        if datamodule is not None:
            datamodule.trainer = self
        self.callbacks = attach.with_module_callbacks(self.callbacks, model)
        for callback in self.callbacks:
            callback.pl_module = model
        hooks = self._hooks = HookTable(self, model, self.callbacks, strategy, LightningModule, self.logbook)
        limits = {"validate": self.limits.val_batches, "test": self.limits.test_batches}
        loaders = Loaders(model, datamodule, passed, limits, hooks.call_method)
        attach.check_loaders(model, loaders, fn, validates=self.limits.val_batches != 0)
        if fn is TrainerFn.FITTING and not self._plan_shown and self.progress_bar_callback is not None:
            self._plan_shown = True
            self.print(self.plan)

        strategy.setup_environment()
        for party in (datamodule, model):
            if party is not None and self._prepares_data(party):
                party.prepare_data()
        if datamodule is not None:
            datamodule.setup(stage)
        hooks.call_callbacks("setup", stage)
        hooks.call_method("setup", stage)
        with strategy.tensor_init_context():
            hooks.call_method("configure_model")
        loaded = None if ckpt_path is None else strategy.load_checkpoint(ckpt_path)
        if loaded is not None:
            checkpoint.restore_parts(self, loaded, fitting=fn is TrainerFn.FITTING)
        strategy.setup(self)
        run = self._run_parts = Run(
            engine=self.engine,
            module=model,
            hooks=hooks,
            book=self.logbook,
            progress=progress,
            limits=self.limits,
            settings=self.settings,
            transfer=bind_transfer(model, datamodule, strategy.root_device, self.logbook),
            loaders=loaders,
            log=self._log if self.loggers else None,
        )
        if fn is TrainerFn.FITTING:
            self._set_up_optimizers(hooks)
            hooks.call("on_fit_start")
            if loaded is not None:
                checkpoint.restore_training(self, loaded)
        model.zero_grad()
        return run

    def _set_up_optimizers(self, hooks: HookTable) -> None:
        optimizers, schedulers = normalise(hooks.call_method("configure_optimizers"))
        if not optimizers:
            rank_zero_warn(
                f"{type(self.lightning_module).__name__}.configure_optimizers returned no optimizer, so gradients are "
                "computed and nothing is updated."
            )
        if len(optimizers) > 1:
            raise NotSupportedError(
                f"configure_optimizers returned {len(optimizers)} optimizers, and this version steps one. "
                "Put all parameters into one optimizer, as parameter groups."
            )
        self.engine.setup_optimizers(optimizers, schedulers)

    def _prepares_data(self, party: DataHooks) -> bool:
        """One process per node, or one in the whole job (trap T41)."""
        once_per_node = party.prepare_data_per_node or self.strategy.node_rank == 0
        return overrides(party, "prepare_data", DataHooks) and self.strategy.local_rank == 0 and once_per_node

    def _tear_down(self, fn: TrainerFn) -> None:
        """Everything after the last loop, in the order of spec 3.3."""
        self._clean_up()
        self.strategy.teardown()
        if fn is TrainerFn.FITTING:
            self.hooks.call("on_fit_end")
        if self.datamodule is not None:
            self.datamodule.teardown(fn.value)
        self.hooks.call_callbacks("teardown", fn.value)
        self.hooks.call_method("teardown", fn.value)
        for logger in self.loggers:
            logger.finalize("success")

    def _abort(self, error: BaseException) -> None:
        """Tell everybody that the run ends by ``error`` and free what it held, however little was built (T58)."""
        self.progress.status = TrainerStatus.INTERRUPTED
        self.logbook.leave_batch()
        with _ignore_interrupts():
            for callback in self.callbacks:
                if overrides(callback, "on_exception", Callback):
                    _attempt(callback.on_exception, self, self.lightning_module, error)
            if self.datamodule is not None:
                _attempt(self.datamodule.on_exception, error)
            _attempt(self.strategy.on_exception, error)
            for logger in self.loggers:
                _attempt(logger.finalize, "failed")
            _attempt(self._clean_up)
            _attempt(self.strategy.teardown)

    def _clean_up(self) -> None:
        if self._run_parts is not None:
            while self._run_parts.cleanups:
                self._run_parts.cleanups.pop()()

    @contextmanager
    def _torch_flags(self, fn: TrainerFn) -> Iterator[None]:
        """torch's process-wide switches as the settings want them, and as they were before afterwards."""
        settings = self.settings
        with ExitStack() as stack:
            if settings.deterministic is not None:
                stack.enter_context(_deterministic(settings.deterministic))
            benchmark = settings.benchmark
            if benchmark is None and settings.deterministic:
                benchmark = False  # its choice of algorithm depends on the clock
            if benchmark is not None:
                stack.enter_context(_cudnn_benchmark(benchmark))
            if fn is TrainerFn.FITTING:
                stack.enter_context(torch.set_grad_enabled(True))
                if settings.detect_anomaly:
                    stack.enter_context(torch.autograd.set_detect_anomaly(True))
            yield

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        """Give ``metrics`` to every logger. A metric called "step" is the x axis (trap T11)."""
        given = dict(metrics)
        step = int(given.pop("step", step))
        given.setdefault("epoch", self.progress.current_epoch)
        self.logbook.logged_metrics.update(given)
        if self.progress.stage is not RunningStage.SANITY_CHECKING:
            for logger in self.loggers:
                logger.log_metrics(given, step)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _best_path(self) -> str:
        return getattr(self.checkpoint_callback, "best_model_path", "")

    def _resolve_ckpt_path(self, ckpt_path: str | Path | None, weights_only: bool | None) -> str | None:
        if weights_only is False:
            raise NotSupportedError(
                "weights_only=False would run code from the checkpoint, which this version never does. Leave it out."
            )
        if ckpt_path is None:
            return None
        if ckpt_path in ("best", "last"):
            attribute = f"{ckpt_path}_model_path"
            found: str = getattr(self.checkpoint_callback, attribute, "")
            if not found:
                raise CheckpointError(
                    f'ckpt_path="{ckpt_path}" names no checkpoint: '
                    + (
                        "the ModelCheckpoint has saved none so far."
                        if self.checkpoint_callback
                        else "there is no ModelCheckpoint among the callbacks."
                    )
                    + " Pass a path."
                )
            return found
        path = os.fspath(ckpt_path)
        if not os.path.exists(path):
            raise CheckpointError(f"There is no checkpoint at {path}. Check the path.")
        return path


def _results_table(stage: str, results: list[dict[str, float]]) -> str:
    names = sorted({name for result in results for name in result})
    wide = max([len(name) for name in names], default=0)
    rows = [f"  {name:<{wide}}  " + "  ".join(f"{r.get(name, float('nan')):.6g}" for r in results) for name in names]
    return "\n".join([f"{stage}:" if rows else f"{stage}: nothing was logged", *rows])


def _attempt(fn: Callable[..., Any], *args: Any) -> None:
    """Call ``fn`` while an exception is on its way: a second one must not hide the first, nor stop the clean-up."""
    try:
        fn(*args)
    except Exception as error:
        rank_zero_warn(f"While cleaning up after an exception, {getattr(fn, '__qualname__', fn)} failed: {error!r}.")


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ctrl-C pressed again does not tear the clean-up; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _cudnn_benchmark(benchmark: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark  # not cudnn.flags(): its other defaults would switch cuDNN off
    torch.backends.cudnn.benchmark = benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _deterministic(mode: bool | Literal["warn"]) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    name = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it when it makes a handle, and is not deterministic without
    workspace = os.environ.get(name)
    torch.use_deterministic_algorithms(bool(mode), warn_only=mode == "warn")
    if mode:
        os.environ.setdefault(name, ":4096:8")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            os.environ.pop(name, None)
