"""A mixin whose methods let drivetrain's strategies call an accelerator of Lightning 1.1.

The accelerator's default methods call ``strategy.usual``: the strategy's own methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import calls, defined_by_user
from drivetrain.base.rank_zero import rank_zero_info
from drivetrain.errors import ConfigurationError
from drivetrain.legacy.v1_1.results import Result
from drivetrain.legacy.v1_1.synced_log import log_through
from drivetrain.legacy.v1_1.wrappers import that_runs_steps
from drivetrain.legacy.v1_3.stepping import Stepped


class Driven(Stepped):
    """The mixin: ``adapted(Driven, "ddp", accelerator)`` is a ``DDPStrategy`` whose methods call ``accelerator``."""

    epoch_ends_last = False
    environment: Any = None
    results_of: frozenset[str]
    log_of_run: Any = None

    def connect(self, module: nn.Module) -> None:
        self.done, self.loop, self.takes, self.results_of = frozenset(), None, {}, frozenset()
        self.usual.connect(module)

    def set_ranks(self, environment: Any, num_nodes: int) -> None:
        self.environment = environment
        if self.source.made_by_cluster and not environment.creates_processes_externally:
            raise ConfigurationError(
                f"{type(self.source).__name__} trains in processes that a cluster has started, and nothing has started "
                "this one. Start the program with torchrun or srun, or use DDPAccelerator, which starts them itself."
            )
        self.usual.set_ranks(environment, num_nodes)

    def _meet(self) -> None:
        slurm = "SLURM" in type(self.cluster_environment).__name__  # type: ignore[attr-defined]
        self.source.init_ddp_connection(self.global_rank, self.world_size, slurm)

    def setup(self, trainer: Any) -> None:
        self.trainer = self.source.trainer = trainer
        if self.source.nickname is not None:
            rank_zero_info(f"{self.source!r} trains by {type(self).__bases__[1].__name__}.")
        if defined_by_user(self.source, "sync_tensor"):
            self.lightning_module.log = self.log_of_run = log_through(self.source, self.lightning_module)
        self.call("setup", self.lightning_module)
        self.prepare()  # does nothing if setup() of the accelerator has already called prepare()

    def setup_optimizers(self, trainer: Any) -> None:
        self.source.setup_optimizers(self.lightning_module)
        if self.once("optimizers"):  # the accelerator may override setup_optimizers() and create no optimizers
            self.make_optimizers(trainer)

    def model_to_device(self) -> None:
        self.source.model_to_device(self.model)

    def run(self, function: Callable[[], Any]) -> Any:
        self.loop = function
        return self.source.train()

    def run_stage(self) -> Any:
        """Run the Trainer's current loop, and return the results of the loop.

        Raises:
            ConfigurationError: no Trainer has started a run.
        """
        if self.loop is None:
            name = type(self.source).__name__
            raise ConfigurationError(
                f"{name}.train() continues a run of a Trainer, and no Trainer has started one. Write "
                f"Trainer(accelerator={name}()).fit(model)."
            )
        return self.loop()

    def teardown(self) -> None:
        if self.log_of_run is not None and vars(self.lightning_module).get("log") is self.log_of_run:
            del self.lightning_module.log
        self.log_of_run = None
        super().teardown()
        self.trainer = None  # the next loop with this accelerator may have no Trainer

    # ---- inside a step -----------------------------------------------------------------------------------------------

    asked: str | None = None
    dataloader_idx = 0
    norm_options: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def ask(self, name: str, arguments: dict[str, Any]) -> Any:
        self.asked, self.source.step_args = name, list(arguments.values())
        output = self.call(name, self.source.step_args)
        # drop the arguments, so that the batch does not stay in memory until the next step
        self.asked, self.source.step_args = None, []
        if not isinstance(output, Result):
            return output
        self.results_of |= {name}
        return output.logged_by(self.lightning_module)

    def run_module(self, name: str, *args: Any) -> Any:
        self.asked = None  # from now on, a call of the wrapper runs its usual forward pass
        return super().run_module(name, *args)

    def epoch_outputs(self, name: str, outputs: list[Any]) -> Any:
        return Result.of_epoch(outputs) if name in self.results_of else outputs

    predict_step = calls("usual.predict_step")

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self.dataloader_idx = dataloader_idx
        return self.source.batch_to_device(batch, device or self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return self.source.backward(closure_loss, optimizer, self.index_of(optimizer), *args, **kwargs)

    def zero_grad(self, optimizer: Optimizer) -> None:
        self.source.optimizer_zero_grad(self.trainer.progress.batch_idx, optimizer, self.index_of(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        batch_idx = 0 if self.trainer is None else self.trainer.progress.batch_idx
        if kwargs.pop("make_optimizer_step", True) is False:
            return closure()
        result = self.source.optimizer_step(optimizer, batch_idx, self.index_of(optimizer), closure, **kwargs)
        if self.facts.earlier.clears_last:
            self.trainer.hooks.call("on_before_zero_grad", optimizer)
            self.zero_grad(optimizer)
        return result

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        self.norm_options = args, kwargs
        return self.source.clip_gradients(optimizer, max_norm)

    def _wrapped(self, module: nn.Module) -> Any:
        wrapped = self.source.configure_ddp(module, self.source.get_device_ids())
        self._averaged = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        return that_runs_steps(wrapped, module, self)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        wrapped: nn.Module = self.usual.setup_module(module, move_to_device)
        if wrapped is module and "ddp" not in self.source.strategy_name:
            return module
        # in an evaluation ``wrapped`` is the module itself, which gets a new wrapper
        return that_runs_steps(wrapped, module, self)

    block_backward_sync = calls("source.block_ddp_plugin_sync_behaviour")
    reduce = calls("source.sync_tensor")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if all or self.loop is None or not defined_by_user(self.source, "early_stopping_should_stop"):
            return bool(self.usual.reduce_boolean_decision(decision, all))
        return bool(self.source.early_stopping_should_stop(self.lightning_module))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return dict(self.source.distributed_sampler_kwargs) if self.source.require_distributed_sampler else {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.usual.save_checkpoint(self.source.on_save(checkpoint), path, storage_options)
