"""The base class of Lightning 1.3's training-type plugins; its methods call drivetrain's strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import calls, is_own_class, reads
from drivetrain.base.lazy import on_first_use
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.legacy.parts import AsksStrategy, OfAccelerator
from drivetrain.legacy.v1_3.precision_plugins import PrecisionPlugin

with on_first_use:
    from drivetrain.legacy.v1_3 import accelerators

NEVER_USED = frozenset({
    "cluster_environment", "configure_sync_batchnorm", "determine_ddp_device_ids", "global_rank", "local_rank",
    "mp_spawn_kwargs", "new_process", "node_rank", "parallel_devices", "reconciliate_processes",
    "restore_model_state_from_ckpt_path", "rpc_enabled", "set_world_ranks", "setup_distributed",
    "transfer_distrib_spawn_state_on_fit_end", "update_global_step", "world_size",
})  # fmt: skip
"""Members of Lightning 1.3's plugins that drivetrain does not need, because the strategy does the work."""


def _runs(step: str) -> Any:
    """Return a method that runs the module's method ``step`` inside the forward pass of the module's wrapper."""

    def method(self: Any, *args: Any) -> Any:
        return self.strategy.run_module(step, *args)

    method.__doc__ = f"Run the module's ``{step}``."
    return method


class TrainingTypePlugin(OfAccelerator, AsksStrategy):
    """Base class of the plugins that train a model on one or several devices; a subclass can override each method.

    Attributes:
        strategy_name: the registered name of drivetrain's strategy for this plugin.
        wraps_in_setup: True: ``setup`` wraps the model; False: ``pre_dispatch`` wraps the model.
        accelerator: the accelerator to which this plugin belongs.
    """

    strategy_name = "single_device"
    wraps_in_setup = True
    setup_optimizers_in_pre_dispatch: bool = False
    call_configure_sharded_model_hook: bool = True
    passing = "Write CPUAccelerator(PrecisionPlugin(), {name}(...)), or pass it to a Trainer."
    _results: Any = None

    def strategy_arguments(self) -> dict[str, Any]:
        """Return the arguments of the strategy's constructor."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return further arguments of drivetrain's Trainer for this plugin, without the strategy."""
        return {}

    def as_settings(self) -> dict[str, Any]:
        """Return the arguments of drivetrain's Trainer for this plugin. Called if the program passes no accelerator."""
        plugin: Any = self
        found = (self.accelerator or accelerators.Accelerator(PrecisionPlugin(), plugin)).as_settings()
        found["strategy"].own_parts.precision = None  # the Trainer's arguments determine the precision
        return dict(found)

    is_global_zero = reads("strategy.usual.is_global_zero")
    """Whether this process is rank 0 of the job."""
    lightning_module = reads("strategy.lightning_module")
    """The user's module."""
    model = reads("strategy.model", writable=True)
    """The wrapper around the model, or the model itself if there is no wrapper. A user's ``configure_ddp`` can set this
    attribute or ``_model``.
    """

    _model = model

    results = reads("_results")
    """The results of the last run."""

    # ---- ranks and devices, and properties of an earlier plugin ------------------------------------------------------

    global_rank = reads("strategy.global_rank")
    """Rank of this process in the job."""
    local_rank = reads("strategy.local_rank")
    """Rank of this process on its machine."""
    node_rank = reads("strategy.node_rank")
    """Rank of this machine."""
    world_size = reads("strategy.world_size")
    """The number of processes in the job."""
    parallel_devices = reads("strategy.parallel_devices")
    """This machine's devices."""

    @property
    def cluster_environment(self) -> Any:
        """The cluster environment, which provides the ranks."""
        return getattr(self.strategy, "cluster_environment", None)

    @property
    def on_gpu(self) -> Any:
        """Whether the model is trained on a GPU."""
        return self.root_device.type == "cuda"

    @property
    def on_tpu(self) -> Any:
        """Whether the model is trained on a TPU."""
        return self.root_device.type == "xla"

    should_rank_save_checkpoint = reads("is_global_zero")
    """Whether this process writes checkpoints."""

    # ---- set-up, the run and its end ---------------------------------------------------------------------------------

    connect = calls("strategy.usual.connect")
    """``connect(model)``: store the user's module."""

    def setup_environment(self) -> None:
        """Start the processes, and select this process's device."""
        strategy = self.strategy
        if strategy.accelerator is None:  # without a Trainer, the devices and ranks are not set yet
            strategy.launch()
        else:
            strategy.usual.setup_environment()

    model_sharded_context = calls("strategy.usual.model_sharded_context")
    """Return the context in which ``configure_sharded_model`` runs."""

    def setup(self, model: nn.Module) -> None:
        """Convert, move and wrap the model, unless :meth:`pre_dispatch` will do so."""
        if self.wraps_in_setup or self.strategy.facts.restores_after_setup:
            self.strategy.prepare()

    model_to_device = calls("strategy.usual.model_to_device")
    """Move the model to the device."""

    def init_optimizers(self, trainer: Any, model: nn.Module) -> None:
        """Create the optimizers from the result of ``configure_optimizers``."""
        self.strategy.make_optimizers(trainer)

    pre_dispatch = calls("strategy.prepare")
    """Convert, move and wrap the model, unless :meth:`setup` has done so."""

    def dispatch(self, trainer: Any) -> None:
        """Called in each process, before the loop over batches."""

    def start_training(self, trainer: Any) -> None:
        """Run the training, and store the results. ``start_evaluating`` and ``start_predicting`` do the same for other
        runs.
        """
        self._results = self.strategy.run_stage()

    start_evaluating = start_predicting = start_training

    def post_dispatch(self, trainer: Any) -> None:
        """Called after the loop over batches."""

    # ---- inside a step -----------------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``training_step``. The other methods ``*_step_context`` return contexts for the
        other steps.
        """
        return nullcontext()

    val_step_context = test_step_context = predict_step_context = train_step_context

    training_step = _runs("training_step")

    validation_step = _runs("validation_step")

    test_step = _runs("test_step")

    predict_step = _runs("predict_step")

    def post_training_step(self) -> None:
        """Called after the module's ``training_step``, before the backward pass."""

    def pre_backward(self, closure_loss: Tensor, should_accumulate: bool, optimizer: Any, opt_idx: int) -> None:
        """Called before a backward pass."""

    def post_backward(self, closure_loss: Tensor, should_accumulate: bool, optimizer: Any, opt_idx: int) -> None:
        """Called after a backward pass."""

    def optimizer_step(
        self, optimizer: Optimizer, lambda_closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Let the run's precision step ``optimizer``."""
        strategy = self.strategy
        return strategy.usual.optimizer_step(optimizer, lambda_closure, strategy.model, **kwargs)

    def post_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int, **kwargs: Any) -> None:
        """Called after each step of the optimizer, and after a skipped step."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (ignored := sorted(NEVER_USED & vars(cls).keys())) and not is_own_class(cls):
            rank_zero_warn(
                f"{cls.__name__} overrides {', '.join(ignored)}, which is never used: the present strategy does "
                "this itself. Override setup_environment, init_ddp_connection or configure_ddp, or pass a "
                "cluster environment."
            )

    reduce = calls("strategy.usual.reduce")
    """``reduce(tensor, group=None, reduce_op='mean')``: return the reduction over the ranks."""
    reduce_boolean_decision = calls("strategy.usual.reduce_boolean_decision")
    """``reduce_boolean_decision(decision)``: return whether ``decision`` is true on all ranks."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Write ``checkpoint`` on rank 0, atomically."""
        strategy = self.strategy
        strategy.usual.save_checkpoint(self.on_save(checkpoint), filepath, strategy.storage_options)

    lightning_module_state_dict = calls("strategy.usual.lightning_module_state_dict")
    """Return the module's complete state."""
    optimizer_state = calls("strategy.usual.optimizer_state")
    """``optimizer_state(optimizer)``: return an optimizer's complete state."""
