"""The base class of Lightning 1.1's accelerators, whose methods run the complete job."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import calls, reads
from drivetrain.legacy.adapted import adapted
from drivetrain.legacy.parts import AsksStrategy, EarlierAccelerator
from drivetrain.legacy.v1_1.plugins import DDPPlugin
from drivetrain.legacy.v1_1.strategy import Driven
from drivetrain.strategies.parallel import ParallelStrategy
from drivetrain.strategies.strategy import StrategyRegistry

_LATE = ("trainer", "nprocs")


class _LateBound(type):
    """The metaclass of accelerators.

    A program can omit the arguments ``trainer`` and ``nprocs``, even if a constructor requires these arguments. The
    constructor then gets ``None``, and the Trainer supplies the values later.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        for position, parameter in enumerate(parameters):
            required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if required and parameter.name in _LATE and position >= len(args):
                kwargs.setdefault(parameter.name, None)
        return super().__call__(*args, **kwargs)


def _runs(step: str, context: str) -> Any:
    """Return a method ``step(args=None)`` that runs the module's method ``step`` in the run's precision.

    Without ``args``, the method passes :attr:`Accelerator.step_args`, the arguments of the running step.
    """
    return lambda self, args=None: self._step(step, context, args)


class Accelerator(EarlierAccelerator, AsksStrategy, metaclass=_LateBound):
    """An accelerator of Lightning 1.1. A subclass can override each method, and call ``super()`` in the override.

    A program need not pass ``trainer``, even if a subclass's constructor requires this argument. The Trainer sets
    ``accelerator.trainer`` later. An override of ``setup`` can omit the parameter ``model``, and an override of a step
    can omit ``args``.

    Args:
        trainer: stored as an attribute.
        cluster_environment: provides the ranks; ``None``: the Trainer's environment, or the detected environment.
        ddp_plugin: the plugin that wraps the model in DDP.

    Attributes:
        trainer: the Trainer that runs the job. Before the job, this attribute is the constructor's argument.
        nickname: the value of ``Trainer(distributed_backend=...)`` for this accelerator.
        train_loop, validation_loop, test_loop: aliases of :meth:`train_or_test`.
        step_args: the arguments of the running step: batch, batch_idx and so on.
        strategy_name: the registered name of drivetrain's strategy for this accelerator.
        made_by_cluster: whether only a cluster can start the processes.
    """

    strategy_name = "ddp"
    made_by_cluster = False
    ends_evaluation_epochs = False
    nickname: str | None = None
    step_args: list[Any]
    _cluster: Any = None
    _dist: Any = None

    def __init__(self, trainer: Any = None, cluster_environment: Any = None, ddp_plugin: Any = None) -> None:
        self.trainer = trainer
        self.cluster_environment = cluster_environment
        self.ddp_plugin = ddp_plugin
        self.step_args = []
        self.train_loop = self.validation_loop = self.test_loop = self.train_or_test

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nickname={self.nickname!r})"

    def strategy_arguments(self) -> dict[str, Any]:
        """Return the arguments of the strategy's constructor."""
        strategy = StrategyRegistry.entry(self.strategy_name).cls
        found = {"cluster_environment": self._cluster} if issubclass(strategy, ParallelStrategy) else {}
        return {**found, **self.ddp_plugin._ddp_kwargs} if "ddp" in self.strategy_name else found

    @property
    def strategy(self) -> Any:
        """drivetrain's strategy, with methods that call this accelerator."""
        if self._strategy is None:
            self.ddp_plugin = self.ddp_plugin or DDPPlugin()
            self.ddp_plugin.accelerator = self
            self._strategy = adapted(Driven, self.strategy_name, self, **self.strategy_arguments())
        return self._strategy

    def as_settings(self) -> dict[str, Any]:
        found = super().as_settings()
        return found if (devices := getattr(self, "nprocs", None)) is None else {**found, "devices": devices}

    @property
    def cluster_environment(self) -> Any:
        """The cluster environment: the constructor's argument, the Trainer's argument, or the detected environment."""
        return self._cluster or getattr(self._strategy, "environment", None)

    @cluster_environment.setter
    def cluster_environment(self, given: Any) -> None:
        self._cluster = given

    # ---- facts of an accelerator -------------------------------------------------------------------------------------

    @property
    def dist(self) -> Any:
        """The group of all ranks. The group has the attribute ``rank`` and collectives such as ``broadcast``."""
        return self._dist or self.strategy.world

    @dist.setter
    def dist(self, given: Any) -> None:
        self._dist = given

    optimizers = reads("strategy.optimizers")
    """The optimizers of the run."""

    @property
    def rpc_enabled(self) -> bool:
        """False: processes never use RPC."""
        return False

    require_distributed_sampler = reads("strategy.facts.is_distributed")
    """Whether the samples are distributed over the ranks."""

    def get_reference_model(self, model: Any) -> Any:
        """Return the user's module, without a wrapper."""
        return self.strategy.lightning_module if model is self.strategy.model else model

    def get_device_ids(self) -> list[int] | None:
        """Return a list with the index of this process's GPU; ``None`` on the CPU."""
        index = self.root_device.index
        return None if index is None else [index]

    # ---- set-up, the run and its end ---------------------------------------------------------------------------------

    def setup(self, model: Any = None) -> None:
        """Prepare the run: move the model to the device, convert the model to the precision, and wrap the model. In a
        user's loop, which has no Trainer, also start the processes and create the optimizers.

        Args:
            model: the model; ``None``: the Trainer's model.
        """
        strategy = self.strategy
        if strategy.trainer is not None:
            strategy.prepare()
            return
        strategy.connect(model)
        strategy.launch()
        strategy.prepare()
        self.setup_optimizers(model)
        strategy.setup_precision_plugin()

    def model_to_device(self, model: Any = None, process_idx: int | None = None) -> None:
        """Move the model to the device."""
        self.strategy.usual.model_to_device()

    def init_ddp_connection(self, global_rank: int, world_size: int, is_slurm_managing_tasks: bool = True) -> None:
        """Create the process group."""
        environment = self.cluster_environment
        self.ddp_plugin.init_ddp_connection(self.trainer, environment, global_rank, world_size, is_slurm_managing_tasks)

    configure_ddp = calls("ddp_plugin.configure_ddp")
    """``configure_ddp(model, device_ids)``: return the wrapper around ``model`` that exchanges gradients."""

    def setup_optimizers(self, model: Any = None) -> None:
        """Create the optimizers, if the run is a fit and has no optimizers yet."""
        trainer = self.strategy.trainer
        if (trainer is None or trainer.progress.fn == "fit") and self.strategy.once("optimizers"):
            self.strategy.make_optimizers(trainer)
            self.ddp_plugin.on_after_setup_optimizers(trainer)

    train = calls("train_or_test")
    """Run the Trainer's current loop from the first batch to the last, and return the results of the loop."""

    def train_or_test(self) -> Any:
        """Run the Trainer's current loop (training, validation or test), and return the results of the loop."""
        return self.strategy.run_stage()

    # ---- a step: ``args`` contains the batch, its index and the step's further arguments -----------------------------

    training_step = _runs("training_step", "train_step_context")
    validation_step = _runs("validation_step", "val_step_context")
    test_step = _runs("test_step", "test_step_context")

    def _step(self, name: str, context: str, args: list[Any] | None) -> Any:
        batch, *others = self.step_args if args is None else args
        strategy = self.strategy
        if strategy.driver.transfer is None:  # a user's loop
            batch = self.batch_to_device(batch, self.root_device)
        with getattr(strategy.precision_plugin, context)():
            return strategy.run_module(name, batch, *others)

    def batch_to_device(self, batch: Any, device: torch.device) -> Any:
        """Move the batch to ``device`` with the module's transfer hook."""
        return self.strategy.usual.batch_to_device(batch, device, self.strategy.dataloader_idx)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None = None, opt_idx: int = 0, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the gradients, and return the loss. Gradients are scaled if the precision scales the loss."""
        strategy = self.strategy
        strategy.differentiate(closure_loss, optimizer, strategy.accumulates, *args, **kwargs)
        return closure_loss.detach()

    def optimizer_step(
        self, optimizer: Optimizer, batch_idx: int, opt_idx: int, lambda_closure: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Let the precision step ``optimizer``. Accelerators had this method in Lightning 1.0."""
        return self.strategy.usual.optimizer_step(optimizer, lambda_closure, self.strategy.model, **kwargs)

    def optimizer_zero_grad(self, batch_idx: int, optimizer: Optimizer, opt_idx: int) -> None:
        """Call the module's hook ``optimizer_zero_grad``, which clears the gradients. Accelerators had this method in
        Lightning 1.0.
        """
        trainer = self.strategy.trainer
        epoch = 0 if trainer is None else trainer.current_epoch
        self.strategy.lightning_module.optimizer_zero_grad(epoch, batch_idx, optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float | None = None) -> Any:
        """Clip the optimizer's gradients by their norm; ``None``: the Trainer's value; 0: no clipping."""
        strategy = self.strategy
        if clip_val is None and strategy.trainer is not None:
            clip_val = strategy.trainer.settings.gradient_clip_val
        if clip_val is None or clip_val <= 0:
            return None
        args, kwargs = strategy.norm_options
        return strategy.usual.clip_gradients_norm(strategy.lightning_module, optimizer, clip_val, *args, **kwargs)

    def sync_tensor(self, tensor: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
        """Reduce a tensor over all ranks with ``reduce_op``; the default is the sum."""
        return self.strategy.usual.reduce(tensor, group, "sum" if reduce_op is None else reduce_op)

    def early_stopping_should_stop(self, pl_module: nn.Module) -> bool:
        """Return whether the run must end, because at least one rank was asked to stop."""
        return bool(self.strategy.usual.reduce_boolean_decision(self.trainer.should_stop, all=False))

    block_ddp_plugin_sync_behaviour = calls("block_backward_sync")
    """Return a context in which backward passes do not exchange gradients with other processes."""
    optimizer_state = calls("ddp_plugin.optimizer_state")
    """``optimizer_state(optimizer)``: return the complete state; every rank must call this method."""

    def on_train_epoch_end(self, outputs: Any = None) -> None:
        """Called at the end of a training epoch, after the hooks ``on_train_epoch_end`` of callbacks and module."""

    def on_train_end(self) -> None:
        """Called after training."""
