"""Accelerators of Lightning 1.3. Each accelerator consists of a precision plugin and a training-type plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.accelerators.accelerator import HOST
from drivetrain.base.introspect import calls, reads
from drivetrain.legacy.adapted import adapted
from drivetrain.legacy.deprecated import warn_deprecated
from drivetrain.legacy.parts import EarlierAccelerator
from drivetrain.legacy.v1_3.precision_plugins import PrecisionPlugin, precision_plugin_of
from drivetrain.legacy.v1_3.strategy import Composed
from drivetrain.legacy.v1_3.training_type_plugin import TrainingTypePlugin
from drivetrain.legacy.v1_3.training_type_plugins import training_type_plugin_of
from drivetrain.loops.progress import TrainerStatus


def _runs(step: str, context: str) -> Any:
    """Return a method ``step(step_kwargs)`` that runs the module's ``step`` in the ``context`` of both plugins."""
    return lambda self, step_kwargs: self._step(step, context, step_kwargs)


class _OfPlugin:
    """Methods that an accelerator has in common with :class:`TrainingTypePlugin`; each calls the plugin's method."""


for _name in (
    "all_gather", "barrier", "broadcast", "connect", "lightning_module_state_dict", "model_sharded_context",
    "optimizer_state", "post_training_step", "process_dataloader", "save_checkpoint", "setup_environment",
    "start_evaluating", "start_predicting", "start_training", "test_step_end", "training_step_end",
    "validation_step_end",
):  # fmt: skip
    setattr(_OfPlugin, _name, calls(f"training_type_plugin.{_name}"))


class Accelerator(EarlierAccelerator, _OfPlugin):
    """An accelerator of Lightning 1.3; the Trainer sets the devices, the ranks and the cluster environment.

    Args:
        precision_plugin: a plugin, a precision of drivetrain, or a precision's name.
        training_type_plugin: a plugin, or the name of a strategy.
    """

    def __init__(self, precision_plugin: PrecisionPlugin | str, training_type_plugin: TrainingTypePlugin | str) -> None:
        self.take_precision(precision_plugin)
        self.training_type_plugin = training_type_plugin_of(training_type_plugin)
        self.training_type_plugin.accelerator = self

    @property
    def strategy(self) -> Any:
        """drivetrain's strategy, with methods that call this accelerator."""
        if self._strategy is None:
            plugin, precision = self.training_type_plugin, self.precision_plugin.today
            arguments = {**plugin.strategy_arguments(), "precision_plugin": precision}
            self._strategy = adapted(Composed, plugin.strategy_name, self, **arguments)
        return self._strategy

    def __getattr__(self, name: str) -> Any:
        """Look up a member that this class lacks, such as ``supports_float64``, in drivetrain's accelerator."""
        if name.startswith("_") or "precision_plugin" not in self.__dict__ or self.strategy.accelerator is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.strategy.accelerator, name)

    def take_precision(self, given: Any) -> None:
        """Use the precision plugin ``given``, or a new plugin for a precision of drivetrain."""
        self.precision_plugin = precision_plugin_of(given)
        self.precision_plugin.accelerator = self

    def as_settings(self) -> dict[str, Any]:
        return {**super().as_settings(), **self.training_type_plugin.settings()}

    # ---- facts of an accelerator -------------------------------------------------------------------------------------

    model = reads("training_type_plugin.model", writable=True)
    """The wrapper around the model, or the model itself if there is no wrapper."""
    lightning_module = reads("training_type_plugin.lightning_module")
    """The user's module."""
    root_device = reads("training_type_plugin.root_device")
    """The device of this process."""
    optimizers = reads("strategy.optimizers", writable=True)
    """The optimizers of the run."""
    lr_schedulers = reads("strategy.lr_scheduler_configs", writable=True)
    """The configurations of the run's schedulers."""
    results = reads("training_type_plugin.results")
    """The results of the last run."""
    setup_optimizers_in_pre_dispatch = reads("training_type_plugin.setup_optimizers_in_pre_dispatch")
    """Whether the optimizers are created after the model is wrapped."""
    call_configure_sharded_model_hook = reads("training_type_plugin.call_configure_sharded_model_hook", writable=True)
    """Whether a call of ``configure_sharded_model`` is still pending."""

    def calls_sharded_hook(self, module: Any) -> bool:
        """Whether to call ``configure_sharded_model`` of ``module``; the hook is called only once for each module."""
        return self.call_configure_sharded_model_hook and getattr(module, "call_configure_sharded_model_hook", True)

    # ---- set-up, in the order of the calls ---------------------------------------------------------------------------

    def setup(self, trainer: Any, model: nn.Module) -> None:
        """Set up the plugins; create the optimizers, unless :meth:`pre_dispatch` creates them."""
        self.setup_training_type_plugin(model)
        if not self.setup_optimizers_in_pre_dispatch:
            self.setup_optimizers(trainer)
        self.strategy.setup_precision_plugin()

    setup_training_type_plugin = calls("training_type_plugin.setup")
    """``setup_training_type_plugin(model)``: set up the training-type plugin with the model."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers of a fit; do nothing in other runs."""
        if trainer is None or trainer.progress.fn == "fit":
            self.training_type_plugin.init_optimizers(trainer, self.lightning_module)

    def setup_precision_plugin(self) -> None:
        """Let the precision plugin replace the model, the optimizers and the schedulers."""
        model, optimizers, schedulers = self.precision_plugin.connect(self.model, self.optimizers, self.lr_schedulers)
        self.strategy.model, self.optimizers, self.lr_schedulers = model, optimizers, schedulers
        self.strategy.usual.setup_precision_plugin()

    def connect_training_type_plugin(self, plugin: TrainingTypePlugin, model: nn.Module) -> None:
        """Replace the training-type plugin by ``plugin``, and set up ``plugin`` with ``model``."""
        self._warn_of_connecting("training_type_plugin", plugin)
        self.training_type_plugin = training_type_plugin_of(plugin)
        self.training_type_plugin.accelerator = self
        self.setup_training_type_plugin(model)

    def connect_precision_plugin(self, plugin: PrecisionPlugin) -> None:
        """Replace the precision plugin by ``plugin``, and set up ``plugin``."""
        self._warn_of_connecting("precision_plugin", plugin)
        self.take_precision(plugin)
        self.strategy.precision_plugin = self.precision_plugin.today
        self.setup_precision_plugin()

    def _warn_of_connecting(self, kind: str, plugin: Any) -> None:
        name = f"{type(plugin).__name__}()"
        arguments = f"{kind}={name}, ..." if kind == "precision_plugin" else f"..., {kind}={name}"
        warn_deprecated(f"accelerator.connect_{kind}({name}, ...)", f"{type(self).__name__}({arguments})")

    # ---- the run and its end -----------------------------------------------------------------------------------------

    def pre_dispatch(self, trainer: Any) -> None:
        """Let the plugins prepare the run, and move the optimizers' states to the device."""
        self.training_type_plugin.pre_dispatch()
        for optimizer in self.optimizers if self.root_device != HOST else ():
            if optimizer.state and not hasattr(optimizer, "consolidate_state_dict"):
                optimizer.load_state_dict(optimizer.state_dict())  # moves each state to its parameter's device
        if self.setup_optimizers_in_pre_dispatch:
            self.setup_optimizers(trainer)
        self.precision_plugin.pre_dispatch()

    def dispatch(self, trainer: Any) -> None:
        """Called in each process, before the loop over batches."""
        self.training_type_plugin.dispatch(trainer)
        self.precision_plugin.dispatch(trainer)

    def post_dispatch(self, trainer: Any) -> None:
        """Called in each process, after the loop over batches."""
        self.training_type_plugin.post_dispatch(trainer)
        self.precision_plugin.post_dispatch()

    def teardown(self) -> None:
        """Free the device. First wait for all ranks, unless this rank has failed."""
        trainer = self.strategy.trainer
        if trainer is None or trainer.progress.status is not TrainerStatus.INTERRUPTED:
            self.barrier("teardown")
        self.training_type_plugin.teardown()

    # ---- a step: ``step_kwargs`` contains "batch", "batch_idx" and the step's further arguments ----------------------

    def to_device(self, step_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return ``step_kwargs`` with the batch on the device. In a Trainer's run, the batch is already on the
        device.
        """
        if self.strategy.driver.transfer is not None:
            return step_kwargs
        batch = self.batch_to_device(step_kwargs["batch"], self.root_device, step_kwargs.get("dataloader_idx"))
        return {**step_kwargs, "batch": batch}

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int | None = None) -> Any:
        """Move the batch to ``device`` with the module's transfer hooks."""
        return self.strategy.usual.batch_to_device(batch, device, dataloader_idx or 0)

    training_step = _runs("training_step", "train_step_context")
    validation_step = _runs("validation_step", "val_step_context")
    test_step = _runs("test_step", "test_step_context")
    predict_step = _runs("predict_step", "predict_step_context")

    def _step(self, name: str, context: str, step_kwargs: dict[str, Any]) -> Any:
        step_kwargs = self.to_device(step_kwargs)
        precision, plugin = self.precision_plugin, self.training_type_plugin
        with getattr(precision, context)(), getattr(plugin, context)():
            return getattr(plugin, name)(*step_kwargs.values())

    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        optimizer_idx: int = 0,
        should_accumulate: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Compute gradients; with ``should_accumulate``, processes do not exchange gradients. Return the loss."""
        plugin, parties = self.training_type_plugin, (optimizer, optimizer_idx)
        plugin.pre_backward(closure_loss, should_accumulate, *parties)
        module = self.lightning_module
        loss: Tensor = self.precision_plugin.backward(
            module, closure_loss, *parties, should_accumulate, *args, **kwargs
        )
        plugin.post_backward(closure_loss, should_accumulate, *parties)
        return loss.detach()

    def optimizer_step(
        self, optimizer: Optimizer, opt_idx: int = 0, lambda_closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step ``optimizer``, unless the precision plugin's ``pre_optimizer_step`` returns False."""
        plugin, module = self.precision_plugin, self.lightning_module
        loss = None
        if plugin.pre_optimizer_step(module, optimizer, opt_idx, lambda_closure, **kwargs):
            loss = self.run_optimizer_step(optimizer, opt_idx, lambda_closure, **kwargs)
        else:
            self.strategy.precision_plugin.stepped = False
        plugin.post_optimizer_step(optimizer, opt_idx)
        self.training_type_plugin.post_optimizer_step(optimizer, opt_idx, **kwargs)
        return loss

    def run_optimizer_step(
        self, optimizer: Optimizer, optimizer_idx: int, lambda_closure: Callable[[], Any] | None, **kwargs: Any
    ) -> Any:
        """Let the training-type plugin step ``optimizer``."""
        return self.training_type_plugin.optimizer_step(optimizer, lambda_closure, **kwargs)

    def optimizer_zero_grad(self, current_epoch: int, batch_idx: int, optimizer: Optimizer, opt_idx: int) -> None:
        """Call the module's hook ``optimizer_zero_grad``, which clears the gradients."""
        self.lightning_module.optimizer_zero_grad(current_epoch, batch_idx, optimizer)

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float | None, gradient_clip_algorithm: str = "norm"
    ) -> Any:
        """Clip the gradients of this optimizer's parameters; ``None`` and 0: no clipping."""
        return self.precision_plugin.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def on_train_start(self) -> None:
        """Called before training, after the hooks ``on_train_start`` of callbacks and module."""

    def on_train_epoch_end(self, outputs: Any = None) -> None:
        """Called after ``on_train_epoch_end`` of callbacks and module. An override can omit ``outputs``."""

    def on_train_end(self) -> None:
        """Called after training, after the hooks ``on_train_end`` of callbacks and module."""


class CPUAccelerator(Accelerator):
    """The CPU."""

    hardware = "cpu"


class GPUAccelerator(Accelerator):
    """The machine's GPUs."""

    hardware = "gpu"


class TPUAccelerator(Accelerator):
    """TPUs, by ``torch_xla``."""

    hardware = "tpu"
