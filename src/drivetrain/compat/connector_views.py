"""The private attributes ``trainer._checkpoint_connector``, ``trainer._data_connector`` and so on of Lightning's
Trainer.

The libraries finetuning-scheduler, PINA and scvi-tools read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drivetrain.base import files
from drivetrain.base.introspect import overrides, reads
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.base.registry import Entry
from drivetrain.callback import Callback, Trainer
from drivetrain.errors import ConfigurationError, NotSupportedError, shown
from drivetrain.logbook.entry import Logged
from drivetrain.logbook.logbook import Logbook
from drivetrain.loops.loaders import LOADER_HOOKS, LOADER_WORDS
from drivetrain.module.hooks import DataHooks
from drivetrain.plan import Plan
from drivetrain.settings import Settings
from drivetrain.strategies.strategy import Strategy
from drivetrain.trainer import attach, checkpoint, weights


class AcceleratorView:
    """The accelerator, devices and other choices of a Trainer, under Lightning's names.

    Attributes:
        accelerator: the accelerator.
        precision: the precision.
        _accelerator_flag: the name of the accelerator.
        _strategy_flag: the name of the strategy, or the strategy itself if an instance was passed.
        _devices_flag: on the CPU, the number of processes; otherwise the indices of the devices.
        _parallel_devices: the devices of this machine.
        cluster_environment: the cluster environment, such as the one for SLURM.
        is_distributed: whether there are several processes.
        use_distributed_sampler: the Trainer's argument of this name.

    Setting one of these attributes raises NotSupportedError, because the Trainer's constructor decides the values.
    """

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.use_distributed_sampler = settings.use_distributed_sampler
        self.accelerator, self.precision = plan.accelerator, plan.precision
        self._accelerator_flag = plan.accelerator.name
        self._strategy_flag = plan.strategy.name if isinstance(plan.strategy, Entry) else plan.strategy
        self._parallel_devices = list(plan.devices)
        self.cluster_environment = plan.environment
        self.is_distributed = plan.num_nodes * plan.num_processes > 1
        on_cpu = plan.devices[0].type == "cpu"
        self._devices_flag: Any = len(plan.devices) if on_cpu else [device.index or 0 for device in plan.devices]
        self._decided = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_decided" in self.__dict__:
            word = name.strip("_").removesuffix("_flag")
            raise NotSupportedError(
                f"{name} = {shown(value)} comes too late: this is decided when the Trainer is made. "
                f"Pass it there: Trainer({word}={shown(value)})."
            )
        object.__setattr__(self, name, value)


class CallbackView:
    """Sorts callbacks into the order in which a Trainer calls them."""

    @staticmethod
    def _reorder_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
        return attach.ordered(list(callbacks))


class CheckpointView:
    """Restores parts of a checkpoint during a fit. Each method restores one part.

    To resume a fit from a file, do not call these methods, but ``fit(ckpt_path=...)``. It also restores the position in
    training, and checks that the checkpoint fits. These methods make only the checks that torch makes.

    Attributes:
        _loaded_checkpoint: the content of the checkpoint, from :meth:`resume_start` to :meth:`resume_end`. A program
            can assign another content.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._path: str | None = None
        self._loaded_checkpoint: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_path": None, "_loaded_checkpoint": {}}

    def resume_start(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Read the checkpoint at ``checkpoint_path``, if this is not ``None``.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        self._path = None if not checkpoint_path else files.spelled(checkpoint_path)
        if self._path is not None:
            rank_zero_info(f"Restoring parts of {self._path}.")
            self._loaded_checkpoint = checkpoint.load(self.trainer, self._path, weights_only)

    def restore(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Read the checkpoint, and restore all entries except the position in training."""
        self.resume_start(checkpoint_path, weights_only)
        self.restore_datamodule()
        self.restore_model()
        self.restore_callbacks()
        self.restore_precision_plugin_state()
        if self.trainer.progress.fn == "fit":
            self.restore_optimizers_and_schedulers()
        self.resume_end()

    def restore_datamodule(self) -> None:
        datamodule = self.trainer.datamodule
        if datamodule is not None and (name := type(datamodule).__qualname__) in self._loaded_checkpoint:
            datamodule.load_state_dict(self._loaded_checkpoint[name])

    def restore_model(self) -> None:
        """Call the module's ``on_load_checkpoint``, and load the weights."""
        if self._loaded_checkpoint:
            self.trainer.hooks.call_method("on_load_checkpoint", self._loaded_checkpoint)
            weights.restore(self.trainer, self._loaded_checkpoint, self.trainer.progress.fn == "fit")

    def restore_callbacks(self) -> None:
        """Call ``on_load_checkpoint`` of the callbacks, and restore their states."""
        if self._loaded_checkpoint:
            self.trainer.hooks.call_callbacks("on_load_checkpoint", self._loaded_checkpoint)
            states = self._loaded_checkpoint.get("callbacks", {})
            for callback in self.trainer.callbacks:
                if callback.state_key in states:
                    callback.load_state_dict(states[callback.state_key])

    def restore_precision_plugin_state(self) -> None:
        """Restore the precision's state, such as a gradient scaler's."""
        precision = self.trainer.precision_plugin
        if (state := self._loaded_checkpoint.get(type(precision).__qualname__)) is not None:
            precision.load_state_dict(state, self.trainer.lightning_module, self.trainer.strategy.optimizers)

    def restore_optimizers_and_schedulers(self) -> None:
        """Restore the states of the optimizers and schedulers.

        Raises:
            KeyError: the checkpoint has no states of optimizers or schedulers.
        """
        if not self._loaded_checkpoint:
            return
        for part in ("optimizer_states", "lr_schedulers"):
            if part not in self._loaded_checkpoint:
                raise KeyError(
                    f"{self._path} has no {part!r}: it was saved with save_weights_only=True. Save it without that."
                )
        if self.trainer.strategy.facts.trainer_restores_optimizers:
            self.restore_optimizers()
        self.restore_lr_schedulers()

    def restore_optimizers(self) -> None:
        """Restore the optimizers' states. The number of states may differ from the number of optimizers."""
        strategy = self.trainer.strategy
        if any(overrides(strategy, own, Strategy) for own in ("load_optimizer_states", "load_optimizer_state_dict")):
            strategy.load_optimizer_state_dict(self._loaded_checkpoint)
            return
        for optimizer, state in zip(strategy.optimizers, self._loaded_checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def restore_lr_schedulers(self) -> None:
        states = self._loaded_checkpoint["lr_schedulers"]
        for config, state in zip(self.trainer.lr_scheduler_configs, states, strict=False):
            config.scheduler.load_state_dict(state)

    def restore_loops(self) -> None:
        """Not supported.

        Raises:
            NotSupportedError: always, because drivetrain cannot move a running fit to another position.
        """
        raise NotSupportedError(
            "The progress of a run that is under way cannot be restored. Resume from the checkpoint instead: "
            "trainer.fit(model, ckpt_path=...)."
        )

    restore_training_state = restore_loops

    def resume_end(self) -> None:
        """Drop the checkpoint from memory, and wait for the other ranks."""
        self._loaded_checkpoint = {}
        self.trainer.strategy.barrier("resume_end")

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the content of the checkpoint that ``trainer.save_checkpoint`` would write. Every rank must call this
        method.
        """
        return checkpoint.dump(self.trainer, bool(weights_only))


class LoaderSource:
    """The loaders of a stage, such as "fit"."""

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self._trainer = trainer
        self._stage = stage

    def is_defined(self) -> bool:
        """Return whether the current or last run has loaders for the stage, from an argument or from a hook."""
        run = self._trainer.current_run
        return run is not None and run.loaders.available(self._stage)

    def dataloader(self) -> Any:
        """Return the stage's loaders unchanged, without the Trainer's distributed samplers.

        Raises:
            ConfigurationError: there are no loaders. In the hook ``setup``, the loaders passed to ``trainer.fit`` are
                not available yet.
        """
        trainer, hook = self._trainer, LOADER_HOOKS[self._stage]
        if trainer.current_run is not None:
            return trainer.current_run.loaders.unshared(self._stage)
        for owner in (trainer.datamodule, trainer.lightning_module):
            if owner is not None and overrides(owner, hook, DataHooks):
                return getattr(owner, hook)()
        raise ConfigurationError(
            f"There is no {hook}, and loaders that are passed to the Trainer are known after setup. Ask for them in "
            "configure_optimizers or later; the steps of a fit are trainer.estimated_stepping_batches."
        )


class DataView:
    """The loaders, module and datamodule of a Trainer.

    Attributes:
        _train_dataloader_source, _val_dataloader_source, _test_dataloader_source, _predict_dataloader_source: the
            :class:`LoaderSource` of each stage.
        _datahook_selector: an object with the attributes ``model`` and ``datamodule``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        for stage, word in LOADER_WORDS.items():
            setattr(self, f"_{word}_dataloader_source", LoaderSource(trainer, stage))
        self._datahook_selector = SimpleNamespace(model=trainer.lightning_module, datamodule=trainer.datamodule)


class LoggerView:
    """The logged values of a Trainer, and a method that passes values to the loggers."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    should_update_logs: bool = reads(
        "trainer.is_logging_step", "Whether this batch's values are passed to the loggers."
    )
    callback_metrics: dict[str, Any] = reads("trainer.callback_metrics", "The Trainer's.")

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass ``metrics`` to every logger, by default for the current step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        if numbers and self.trainer.loggers:
            self.trainer._log(numbers, self.trainer.logger_step if step is None else step)


class ResultView:
    """One logged name.

    Attributes:
        meta: how the value was logged: ``name``, ``on_step``, ``on_epoch``, ``prog_bar``, and ``sync.should``.
        is_tensor: True if numbers were logged, False if a ``torchmetrics.Metric`` was logged.
    """

    def __init__(self, logged: Logged) -> None:
        self.meta = SimpleNamespace(
            name=logged.name,
            on_step=logged.on_step,
            on_epoch=logged.on_epoch,
            prog_bar=logged.prog_bar,
            sync=SimpleNamespace(should=logged.sync_dist),
        )
        self.is_tensor = not logged.is_metric


class ResultsView:
    """The values logged in the current epoch of the running stage.

    Attributes:
        result_metrics: one entry for each name.
    """

    def __init__(self, book: Logbook) -> None:
        self.result_metrics = [ResultView(each) for each in book.logged(book.group)]
