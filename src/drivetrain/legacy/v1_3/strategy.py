"""Today's strategies whose methods call an accelerator of the 1.3 generation, which calls its two plugins.

A method of a plugin that the user does not override calls ``strategy.usual``: the method of today's strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.base.introspect import positional_arity
from drivetrain.engine.engine import Engine
from drivetrain.legacy.adapted import Adapted
from drivetrain.legacy.v1_3.epoch_ends import EXTRA_HOOKS, log_dictionaries
from drivetrain.legacy.v1_3.steps import bind_step
from drivetrain.module.optimizers import normalise
from drivetrain.strategies.stepping import OwnStep, StepParts


class _SetUp(Adapted):
    """Set-up."""

    trainer: Any = None
    engine: Engine | None = None
    loop: Callable[[], Any] | None = None
    done: frozenset[str] = frozenset()
    pre_dispatch: Callable[[Any], None]

    def _once(self, what: str) -> bool:
        """Whether ``what`` happens for the first time in this run."""
        first = what not in self.done
        self.done |= {what}
        return first

    def connect(self, module: nn.Module) -> None:
        self.done = frozenset()
        self.source.connect(module)

    def launch(self) -> None:
        """Fill in devices and ranks and start the processes, for a loop of the user's."""
        settings = {name: value for name, value in self.source.as_settings().items() if name != "callbacks"}
        self.engine = Engine(**settings)
        self.engine.launch()

    def setup_environment(self) -> None:
        (self.source if self.engine is None else self.usual).setup_environment()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        module, accelerator = self.lightning_module, self.source
        with accelerator.model_sharded_context():
            if callable(getattr(module, "configure_sharded_model", None)) and accelerator.calls_sharded_hook(module):
                module.configure_sharded_model()
                accelerator.call_configure_sharded_model_hook = module.call_configure_sharded_model_hook = False
            yield

    def setup(self, trainer: Any) -> None:
        self.trainer = trainer
        self.source.take_precision(self.precision_plugin)
        self.source.setup(trainer, self.lightning_module)

    def prepare(self) -> None:
        """Convert, move and wrap the model, once in a run."""
        if self._once("prepare"):
            self.usual.setup(self.trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the accelerator make them: called by the Trainer where its ``setup`` has made none."""
        if self.source.setup_optimizers_in_pre_dispatch:
            self.pre_dispatch(trainer)
        else:
            self.source.setup_optimizers(trainer)

    def make_optimizers(self, trainer: Any) -> None:
        """Make the optimizers of the run; without a Trainer, from what the module returns."""
        if trainer is None:
            self.optimizers, self.lr_scheduler_configs = normalise(self.lightning_module.configure_optimizers())
        else:
            self.usual.setup_optimizers(trainer)

    def connect_precision(self) -> None:
        if self._once("precision"):
            self.source.setup_precision_plugin()


class _Life(_SetUp):
    """The run and its end."""

    def pre_dispatch(self, trainer: Any) -> None:
        """Let the accelerator prepare the run, once."""
        if self._once("dispatch"):
            self.source.pre_dispatch(trainer)

    def run(self, function: Callable[[], Any]) -> Any:
        self.loop = function
        self.pre_dispatch(self.trainer)
        start = {"fit": self.source.start_training, "predict": self.source.start_predicting}
        start.get(self.trainer.progress.fn.value, self.source.start_evaluating)(self.trainer)
        self.source.post_dispatch(self.trainer)
        return self.source.results

    def run_stage(self) -> Any:
        """Run the loop of this run, and return its results."""
        assert self.loop is not None  # run() came first
        self.source.dispatch(self.trainer)
        return self.loop()

    def teardown(self) -> None:
        self.source.teardown()

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "trainer": None,
            "loop": None,
            "engine": None,
            "outputs_of_batch": None,
            "further_arguments": {},
        }
        return {**self.usual.__getstate__(), **own}


class _Steps(_Life):
    """What happens in a step."""

    calls_step_end = True
    enters_step_contexts = True
    calls_optimizer_zero_grad = True
    extra_hooks = EXTRA_HOOKS
    extra_step_arguments = frozenset({"optimizer_idx", "hiddens"})
    further_arguments: Mapping[str, Any] = MappingProxyType({})
    outputs_of_batch: list[Any] | None = None

    @property
    def honoured_hooks(self) -> Any:
        """All hooks in the step with several optimizers; in any other own step, those of today's strategy."""
        return "all" if self.owns_step else self.usual.honoured_hooks

    owns_step = False

    def bind_step(self, parts: StepParts) -> OwnStep | None:
        step = bind_step(self, parts)
        self.owns_step = step is not None
        return step or cast("OwnStep | None", self.usual.bind_step(parts))

    def bound_step(self, name: str) -> Callable[..., Any]:
        self.driver.steps[name] = self.bind(name)
        step: Callable[..., Any] = getattr(self, name)
        return step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.source, "predict_step")(_named(args, kwargs))  # noqa: B009

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "training_step":
            kwargs = {**kwargs, **self.further_arguments}
        output = getattr(self.source, name)(_named(args, kwargs))
        hook = getattr(self.lightning_module, f"{name}_end", None)
        if not callable(hook):
            output = getattr(self.source, f"{name}_end")(output)
        elif not self.usual.calls_step_end:
            output = hook(output)
        if name == "training_step" and isinstance(output, dict):
            log_dictionaries(self.lightning_module, output)
        return output

    def run_module(self, name: str, *args: Any) -> Any:
        """Run a step of the module, through what is wrapped around it."""
        step = self._module_step(name)
        if self.driver.steps:
            return step(*args)
        args = args[: positional_arity(getattr(self.lightning_module, name))]  # a loop of the user's passes all
        if name != "training_step":
            return step(*args)
        with self.usual.accumulating(self.model):  # the backward pass exchanges the gradients
            return step(*args)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self.source.batch_to_device(batch, device, dataloader_idx)


class _Gradients(_Steps):
    """Backward pass and optimizer step."""

    def index_of(self, optimizer: Any) -> int:
        """Return the position of ``optimizer`` among those of the run; 0 for one that is not among them."""
        return next((index for index, each in enumerate(self.optimizers) if each is optimizer), 0)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        run = None if self.trainer is None else self.trainer.current_run
        window = None if run is None else run.window
        accumulates = window is not None and window.batches_done + 1 < window.size
        index = self.index_of(optimizer)
        loss: Tensor = self.source.backward(closure_loss, optimizer, index, accumulates, *args, **kwargs)
        return loss

    def differentiate(self, loss: Tensor, optimizer: Any, accumulates: bool, *args: Any, **kwargs: Any) -> None:
        """Compute gradients as today's strategy does; while ``accumulates`` is true, they stay in this process."""
        by_hand = not (self.driver.steps or accumulates)
        if by_hand:
            self.before_manual_backward(loss)
        self.usual.backward(loss, optimizer, *args, **kwargs)
        if by_hand:
            self.after_manual_backward()

    def zero_grad(self, optimizer: Optimizer) -> None:
        progress = self.trainer.progress
        self.source.optimizer_zero_grad(progress.current_epoch, progress.batch_idx, optimizer, self.index_of(optimizer))

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        return self.source.optimizer_step(optimizer, self.index_of(optimizer), closure, **kwargs)


class _Exchange(_Gradients):
    """Clipping, collectives, checkpoints and facts."""

    storage_options: Any = None

    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.source.training_type_plugin.root_device
        return device

    @property
    def is_global_zero(self) -> bool:
        return bool(self.source.training_type_plugin.is_global_zero)

    def model_to_device(self) -> None:
        self.source.training_type_plugin.model_to_device()

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, *args: Any, **kwargs: Any
    ) -> Any:
        self.norm_options = args, kwargs
        return self.source.clip_gradients(optimizer, max_norm, "norm")

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.source.clip_gradients(optimizer, clip_val, "value")

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.source.training_type_plugin.block_backward_sync()
        return context

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.source.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.source.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.source.training_type_plugin.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decide = self.source.training_type_plugin.reduce_boolean_decision
        return bool(decide(decision) if all else self.usual.reduce_boolean_decision(decision, all))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        gathered: Tensor = self.source.all_gather(tensor, group, sync_grads)
        return gathered

    def process_dataloader(self, loader: Any) -> Any:
        return self.source.process_dataloader(loader)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return dict(self.source.lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return dict(self.source.optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.storage_options = storage_options
        self.source.save_checkpoint(checkpoint, path)

    def on_train_start(self) -> None:
        self.usual.on_train_start()
        self.source.on_train_start()

    def on_train_epoch_end(self, outputs: Any = None) -> None:
        self.source.on_train_epoch_end(outputs)

    def on_train_end(self) -> None:
        self.source.on_train_end()
        self.usual.on_train_end()


class Composed(_Exchange):
    """The mixin: ``adapted(Composed, "ddp", accelerator)`` is ``DDPStrategy`` whose methods call ``accelerator``."""


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a step by name, in order."""
    return {**dict(zip(("batch", "batch_idx", "dataloader_idx"), args, strict=False)), **kwargs}
