"""A mixin whose methods let drivetrain's strategies call an accelerator of Lightning 1.3, which calls two plugins.

The plugins' default methods call ``strategy.usual``: the strategy's own methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import calls, defined_by_user, reads
from drivetrain.legacy.v1_3.defaults import hook_of
from drivetrain.legacy.v1_3.stepping import Stepped, named


class Composed(Stepped):
    """The mixin: ``adapted(Composed, "ddp", accelerator)`` is a ``DDPStrategy`` whose methods call ``accelerator``."""

    def connect(self, module: nn.Module) -> None:
        self.done, self.takes = frozenset(), {}
        reduces = defined_by_user(self.source.training_type_plugin, "reduce")
        self.facts = self.facts.but(earlier=replace(self.facts.earlier, reduces=reduces))
        self.source.connect(module)

    def setup_environment(self) -> None:
        (self.source if self.engine is None else self.usual).setup_environment()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        module, accelerator = self.lightning_module, self.source
        with accelerator.model_sharded_context():
            if hook_of(module, "configure_sharded_model") and accelerator.calls_sharded_hook(module):
                module.configure_sharded_model()
                accelerator.call_configure_sharded_model_hook = module.call_configure_sharded_model_hook = False
            yield

    def setup(self, trainer: Any) -> None:
        self.trainer = trainer
        if self.source.precision_plugin.today is not self.precision_plugin:  # the Trainer has replaced the precision
            self.source.take_precision(self.precision_plugin)
        self.source.setup(trainer, self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the accelerator create the optimizers; the Trainer calls this method if :meth:`setup` created none."""
        if self.source.setup_optimizers_in_pre_dispatch:
            self.pre_dispatch(trainer)
        else:
            self.source.setup_optimizers(trainer)

    def setup_precision_plugin(self) -> None:
        if self.once("precision"):
            self.source.setup_precision_plugin()

    # ---- the run and its end -----------------------------------------------------------------------------------------

    def pre_dispatch(self, trainer: Any) -> None:
        """Let the accelerator prepare the run; do nothing in further calls during a run."""
        if self.once("dispatch"):
            self.source.pre_dispatch(trainer)

    def run(self, function: Callable[[], Any]) -> Any:
        self.loop = function
        self.pre_dispatch(self.trainer)
        start = {"fit": self.source.start_training, "predict": self.source.start_predicting}
        start.get(self.trainer.progress.fn.value, self.source.start_evaluating)(self.trainer)
        self.source.post_dispatch(self.trainer)
        return self.source.results

    def run_stage(self) -> Any:
        """Run the Trainer's current loop, and return the results of the loop."""
        assert self.loop is not None  # the Trainer has called run()
        self.source.dispatch(self.trainer)
        return self.loop()

    # ---- inside a step -----------------------------------------------------------------------------------------------

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.ask("predict_step", named(args, kwargs))

    def ask(self, name: str, arguments: dict[str, Any]) -> Any:
        output = getattr(self.source, name)(arguments)
        if name == "training_step":
            self.source.post_training_step()
        return output

    # ---- backward pass and optimizer step ----------------------------------------------------------------------------

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        index = self.index_of(optimizer)
        return self.source.backward(closure_loss, optimizer, index, self.accumulates, *args, **kwargs)

    def zero_grad(self, optimizer: Optimizer) -> None:
        progress = self.trainer.progress
        self.source.optimizer_zero_grad(progress.current_epoch, progress.batch_idx, optimizer, self.index_of(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        return self.source.optimizer_step(optimizer, self.index_of(optimizer), closure, **kwargs)

    root_device = reads("source.training_type_plugin.root_device")
    is_global_zero = reads("source.training_type_plugin.is_global_zero")
    distributed_sampler_kwargs = reads("source.training_type_plugin.distributed_sampler_kwargs")
    model_to_device = calls("source.training_type_plugin.model_to_device")
    block_backward_sync = calls("source.training_type_plugin.block_backward_sync")
    reduce = calls("source.training_type_plugin.reduce")
    batch_to_device = calls("source.batch_to_device")
    lightning_module_state_dict = calls("source.lightning_module_state_dict")

    def _meet(self) -> None:
        plugin = self.source.training_type_plugin
        if hasattr(plugin, "init_ddp_connection"):
            plugin.init_ddp_connection(self.global_rank, self.world_size)
        else:
            self.usual._meet()

    def _wrapped(self, module: nn.Module) -> Any:
        plugin = self.source.training_type_plugin
        if not hasattr(plugin, "configure_ddp"):
            return self.usual._wrapped(module)
        self._averaged = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        self.model = module
        plugin.configure_ddp()
        return self.model

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        return self.source.clip_gradients(optimizer, max_norm, "norm")

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.source.clip_gradients(optimizer, clip_val, "value")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decide = self.source.training_type_plugin.reduce_boolean_decision
        return bool(decide(decision) if all else self.usual.reduce_boolean_decision(decision, all))

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.storage_options = storage_options
        self.source.save_checkpoint(checkpoint, path)

    def on_train_start(self) -> None:
        self.usual.on_train_start()
        self.source.on_train_start()
