"""The base of the training-type plugins of the 1.3 generation: each of its methods calls today's strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import is_own_class
from drivetrain.base.rank_zero import rank_zero_warn
from drivetrain.errors import ConfigurationError


class _Facts:
    """What a training-type plugin is made of and knows.

    Attributes:
        strategy_name: the registered name of today's strategy.
        wraps_in_setup: whether the model is wrapped in ``setup``; otherwise in ``pre_dispatch``.
        accelerator: the accelerator that this plugin is part of.
    """

    strategy_name = "single_device"
    wraps_in_setup = True
    setup_optimizers_in_pre_dispatch: bool = False
    call_configure_sharded_model_hook: bool = True
    accelerator: Any = None
    _results: Any = None

    def strategy_arguments(self) -> dict[str, Any]:
        """Return the arguments of the strategy's constructor."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return further arguments of today's Trainer that this plugin stands for."""
        return {}

    def as_settings(self) -> dict[str, Any]:
        """Return the arguments of today's Trainer that this plugin stands for, passed alone in ``plugins=``."""
        from drivetrain.legacy.v1_3.accelerators import Accelerator  # here, because it imports this file
        from drivetrain.legacy.v1_3.precision_plugins import PrecisionPlugin

        plugin: Any = self
        found = (self.accelerator or Accelerator(PrecisionPlugin(), plugin)).as_settings()
        found["strategy"].own_parts.precision = None  # the Trainer's arguments decide
        return dict(found)

    @property
    def strategy(self) -> Any:
        """Today's strategy, whose methods call the accelerator, which calls this plugin.

        Raises:
            ConfigurationError: the plugin is not part of an accelerator.
        """
        if self.accelerator is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not part of an accelerator yet. Write "
                f"CPUAccelerator(PrecisionPlugin(), {type(self).__name__}(...)), or pass it to a Trainer."
            )
        return self.accelerator.strategy

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.strategy.usual.root_device
        return device

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0 of the job."""
        return bool(self.strategy.usual.is_global_zero)

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self.strategy.lightning_module

    @property
    def model(self) -> Any:
        """The model as it is wrapped; a ``configure_ddp`` of the user's may set it, or ``_model``."""
        return self.strategy.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.strategy.model = model

    _model = model

    @property
    def results(self) -> Any:
        """What the last run returned."""
        return self._results


class _Ranks(_Facts):
    """Ranks and devices, and what a plugin of its time could be asked."""

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return int(self.strategy.global_rank)

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return int(self.strategy.local_rank)

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return int(self.strategy.node_rank)

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return int(self.strategy.world_size)

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """This machine's devices."""
        devices: Sequence[torch.device] = self.strategy.parallel_devices
        return devices

    @property
    def cluster_environment(self) -> Any:
        """Which process of the job this is, as the cluster says."""
        return getattr(self.strategy, "cluster_environment", None)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments ``num_replicas`` and ``rank`` of a DistributedSampler."""
        return dict(self.strategy.usual.distributed_sampler_kwargs)

    @property
    def on_gpu(self) -> bool:
        """Whether the model is trained on a GPU."""
        return self.root_device.type == "cuda"

    @property
    def on_tpu(self) -> bool:
        """Whether the model is trained on a TPU."""
        return self.root_device.type == "xla"

    @property
    def should_rank_save_checkpoint(self) -> bool:
        """Whether this process writes checkpoints."""
        return self.is_global_zero


class _Life(_Ranks):
    """Set-up, the run and its end."""

    def connect(self, model: nn.Module) -> None:
        """Take the user's module."""
        self.strategy.usual.connect(model)

    def setup_environment(self) -> None:
        """Start the processes and make the device current."""
        strategy = self.strategy
        if strategy.accelerator is None:  # a loop of the user's: nothing has filled in devices and ranks
            strategy.launch()
        else:
            strategy.usual.setup_environment()

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return the context in which ``configure_sharded_model`` runs."""
        context: AbstractContextManager[Any] = self.strategy.usual.model_sharded_context()
        return context

    def setup(self, model: nn.Module) -> None:
        """Convert, move and wrap the model, where that does not come in :meth:`pre_dispatch`."""
        if self.wraps_in_setup or self.strategy.facts.restores_after_setup:
            self.strategy.prepare()

    def model_to_device(self) -> None:
        """Move the model to the device."""
        self.strategy.usual.model_to_device()

    def init_optimizers(self, trainer: Any, model: nn.Module) -> None:
        """Make the optimizers from what ``configure_optimizers`` returns."""
        self.strategy.make_optimizers(trainer)

    def pre_dispatch(self) -> None:
        """Convert, move and wrap the model, where :meth:`setup` has not."""
        self.strategy.prepare()

    def dispatch(self, trainer: Any) -> None:
        """The loop is about to run, in each process."""

    def start_training(self, trainer: Any) -> None:
        """Run the training, and keep its results."""
        self._results = self.strategy.run_stage()

    def start_evaluating(self, trainer: Any) -> None:
        """Run a validation or a test, and keep its results."""
        self._results = self.strategy.run_stage()

    def start_predicting(self, trainer: Any) -> None:
        """Run a prediction, and keep its results."""
        self._results = self.strategy.run_stage()

    def post_dispatch(self, trainer: Any) -> None:
        """The loop has ended."""

    def teardown(self) -> None:
        """Free the device; the model is on the host afterwards."""
        self.strategy.usual.teardown()


class _Steps(_Life):
    """What happens in a step."""

    def train_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``training_step``; the three others are the same for theirs."""
        return nullcontext()

    def val_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``validation_step``."""
        return nullcontext()

    def test_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``test_step``."""
        return nullcontext()

    def predict_step_context(self) -> AbstractContextManager[Any]:
        """Return a new context for one ``predict_step``."""
        return nullcontext()

    def training_step(self, *args: Any) -> Any:
        """Run the module's ``training_step``."""
        return self.strategy.run_module("training_step", *args)

    def validation_step(self, *args: Any) -> Any:
        """Run the module's ``validation_step``."""
        return self.strategy.run_module("validation_step", *args)

    def test_step(self, *args: Any) -> Any:
        """Run the module's ``test_step``."""
        return self.strategy.run_module("test_step", *args)

    def predict_step(self, *args: Any) -> Any:
        """Run the module's ``predict_step``."""
        return self.strategy.run_module("predict_step", *args)

    def post_training_step(self) -> None:
        """The module's ``training_step`` has run, and its loss is not used yet."""

    def training_step_end(self, output: Any) -> Any:
        """Return the output of ``training_step``."""
        return output

    def validation_step_end(self, output: Any) -> Any:
        """Return the output of ``validation_step``."""
        return output

    def test_step_end(self, output: Any) -> Any:
        """Return the output of ``test_step``."""
        return output

    def pre_backward(self, closure_loss: Tensor, should_accumulate: bool, optimizer: Any, opt_idx: int) -> None:
        """A backward pass begins."""

    def post_backward(self, closure_loss: Tensor, should_accumulate: bool, optimizer: Any, opt_idx: int) -> None:
        """A backward pass is done."""

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context whose backward passes leave gradients to this process."""
        context: AbstractContextManager[Any] = self.strategy.usual.block_backward_sync()
        return context

    def optimizer_step(
        self, optimizer: Optimizer, lambda_closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step ``optimizer`` in the precision of the run."""
        strategy = self.strategy
        return strategy.usual.optimizer_step(optimizer, lambda_closure, strategy.model, **kwargs)

    def post_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int, **kwargs: Any) -> None:
        """The optimizer has been stepped, or left out."""


NEVER_USED = frozenset({
    "cluster_environment", "configure_sync_batchnorm", "determine_ddp_device_ids", "global_rank", "local_rank",
    "mp_spawn_kwargs", "new_process", "node_rank", "parallel_devices", "reconciliate_processes",
    "restore_model_state_from_ckpt_path", "rpc_enabled", "set_world_ranks", "setup_distributed",
    "transfer_distrib_spawn_state_on_fit_end", "update_global_step", "world_size",
})  # fmt: skip
"""Members that plugins of that time had, and whose work today's strategy does by itself."""


class TrainingTypePlugin(_Steps):
    """How a model is spread over devices, and the base of all others: a subclass may override any method."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (ignored := sorted(NEVER_USED & vars(cls).keys())) and not is_own_class(cls):
            rank_zero_warn(
                f"{cls.__name__} overrides {', '.join(ignored)}, which is never used: today's strategy knows and does "
                "this by itself. Override setup_environment, init_ddp_connection or configure_ddp, or pass a "
                "cluster environment."
            )

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        self.strategy.usual.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s ``obj`` on every rank."""
        return self.strategy.usual.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction of ``tensor`` over the ranks."""
        return self.strategy.usual.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool) -> bool:
        """Whether all ranks decide so."""
        return bool(self.strategy.usual.reduce_boolean_decision(decision))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks as (world_size, ...); without a process group, the tensor itself."""
        gathered: Tensor = self.strategy.stack(tensor, group, sync_grads)
        return gathered

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader to iterate in place of ``dataloader``."""
        return self.strategy.usual.process_dataloader(dataloader)

    def on_save(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint to write in place of ``checkpoint``."""
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        """Write ``checkpoint`` on rank 0, atomically."""
        strategy = self.strategy
        strategy.usual.save_checkpoint(self.on_save(checkpoint), filepath, strategy.storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's complete state."""
        return dict(self.strategy.usual.lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's complete state."""
        return dict(self.strategy.usual.optimizer_state(optimizer))
