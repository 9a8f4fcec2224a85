"""Common methods of the strategies that call accelerators of Lightning 1.1 or 1.3."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from drivetrain.base.introspect import calls, positional_arity
from drivetrain.engine.engine import Engine
from drivetrain.legacy.adapted import Adapted
from drivetrain.legacy.v1_3 import hooks
from drivetrain.legacy.v1_3.defaults import hook_of
from drivetrain.legacy.v1_3.epoch_ends import call_all, log_dictionaries
from drivetrain.legacy.v1_3.steps import bind_step
from drivetrain.module.optimizers import normalise
from drivetrain.strategies.facts import Earlier
from drivetrain.strategies.step_parts import OwnStep, StepParts


def _asks_for(step: str) -> Any:
    """Return a strategy's method through which the accelerator runs the module's method ``step``."""
    return lambda self, *args, **kwargs: self._step(step, args, kwargs)


class Stepped(Adapted):
    """Mixin for strategies that call an accelerator of Lightning 1.1 or 1.3 for gradients, collectives and steps."""

    trainer: Any = None
    engine: Engine | None = None
    loop: Callable[[], Any] | None = None
    done: frozenset[str] = frozenset()

    def once(self, what: str) -> bool:
        """Return True for the first call with ``what`` in a run, otherwise False."""
        first = what not in self.done
        self.done |= {what}
        return first

    def launch(self) -> None:
        """For a user's loop without a Trainer, set the devices and the ranks, and start the processes."""
        settings = {name: value for name, value in self.source.as_settings().items() if name != "callbacks"}
        self.engine = Engine(**settings)
        self.engine.launch()

    def prepare(self) -> None:
        """Convert, move and wrap the model; do nothing in further calls during a run."""
        if self.once("prepare"):
            self.usual.setup(self.trainer)

    def make_optimizers(self, trainer: Any) -> None:
        """Create the optimizers of the run. In a user's loop, call the module's ``configure_optimizers`` directly."""
        if trainer is None:
            self.optimizers, self.lr_scheduler_configs = normalise(self.lightning_module.configure_optimizers())
        else:
            self.usual.setup_optimizers(trainer)

    teardown = calls("source.teardown")

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = dict.fromkeys(("trainer", "loop", "engine", "outputs_of_batch"))
        return {**self.usual.__getstate__(), **of_this_process, "further_arguments": {}}

    # ---- a step; a subclass defines ``ask`` --------------------------------------------------------------------------

    earlier = Earlier(
        step_ends=True,
        zero_grad=True,
        hooks=frozenset(hooks.GONE),
        step_arguments=frozenset({"optimizer_idx", "hiddens"}),
        enters_contexts=True,
    )
    further_arguments: Mapping[str, Any] = MappingProxyType({})
    outputs_of_batch: list[Any] | None = None

    ask: Callable[[str, dict[str, Any]], Any]
    """The method ``ask(name, arguments)`` lets the accelerator run the module's step ``name``, and returns the output.
    """

    def bind_step(self, parts: StepParts) -> OwnStep | None:
        step = bind_step(self, parts)
        # The step of legacy/v1_3/steps.py calls every hook. Any other step calls only the hooks that drivetrain's
        # strategy honours.
        self.facts = self.facts.but(honoured_hooks=type(self).facts.honoured_hooks if step is None else "all")
        return step or cast("OwnStep | None", self.usual.bind_step(parts))

    def bind(self, name: str) -> Callable[..., Any]:
        if name == "training_step":
            module = self.lightning_module
            asks = "optimizer_idx" in inspect.signature(module.training_step).parameters
            by_hand = asks and not module.automatic_optimization and len(self.optimizers) > 1
            # With manual optimization, the module's step is called only once for all optimizers.
            self.further_arguments = {"optimizer_idx": 0} if by_hand else {}
        return self.usual.bind(name)

    training_step = _asks_for("training_step")
    validation_step = _asks_for("validation_step")
    test_step = _asks_for("test_step")

    def _step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "training_step":
            kwargs = {**kwargs, **self.further_arguments}
        output = self.ask(name, named(args, kwargs))
        hook = hook_of(self.lightning_module, f"{name}_end")
        if hook is None:
            output = getattr(self.source, f"{name}_end")(output)
        elif not self.splits_batches:
            output = hook(output)
        if name == "training_step" and isinstance(output, dict):
            log_dictionaries(self.lightning_module, output)
        return output

    def epoch_outputs(self, name: str, outputs: list[Any]) -> Any:
        """Return the argument that the hook ``*_epoch_end`` gets for the ``outputs`` of the step ``name``."""
        return outputs

    def run_module(self, name: str, *args: Any) -> Any:
        """Run a step of the module inside the forward pass of the module's wrapper."""
        step = self._module_step(name)
        if self.driver.steps:
            return step(*args)
        args = args[: positional_arity(getattr(self.lightning_module, name))]  # a user's loop may pass more arguments
        if name != "training_step":
            return step(*args)
        with self.usual.accumulating(self.model):  # the gradients are exchanged later, in the backward pass
            return step(*args)

    storage_options: Any = None
    epoch_ends_last = True
    """Whether ``on_epoch_end`` is called after the other hooks at the end of training, validation and test epochs."""

    takes: dict[str, bool]

    def call(self, name: str, argument: Any) -> Any:
        """Call a method of the accelerator with ``argument``, or without arguments if the method has no parameter."""
        if name not in self.takes:
            self.takes[name] = positional_arity(getattr(self.source, name)) > 0
        method = getattr(self.source, name)
        return method(argument) if self.takes[name] else method()

    def index_of(self, optimizer: Any) -> int:
        """Return the index of ``optimizer`` among the run's optimizers; 0 for any other optimizer."""
        return next((index for index, each in enumerate(self.optimizers) if each is optimizer), 0)

    @property
    def accumulates(self) -> bool:
        """Whether further batches follow before the next optimizer step."""
        run = None if self.trainer is None else self.trainer.current_run
        window = None if run is None else run.window
        return window is not None and window.batches_done + 1 < window.size

    def differentiate(self, loss: Tensor, optimizer: Any, accumulates: bool, *args: Any, **kwargs: Any) -> None:
        """Let drivetrain's strategy compute gradients; with ``accumulates``, processes do not exchange gradients."""
        by_hand = not (self.driver.steps or accumulates)
        with self.manual_backward_context(loss) if by_hand else nullcontext():
            self.usual.backward(loss, optimizer, *args, **kwargs)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.source.barrier(name)

    broadcast = calls("source.broadcast")
    all_gather = calls("source.all_gather")
    process_dataloader = calls("source.process_dataloader")
    optimizer_state = calls("source.optimizer_state")

    def stack(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, of shape (world_size, ...); without a process group, return the tensor
        itself.
        """
        usual = self.usual
        if usual.facts.is_distributed and self.world_size == 1 and dist.is_initialized():
            return tensor.unsqueeze(0)
        return usual.all_gather(tensor, group, sync_grads)

    def on_fit_start(self) -> None:
        call_all(self.trainer, "on_pretrain_routine_start")
        call_all(self.trainer, "on_pretrain_routine_end")

    def on_train_epoch_end(self) -> None:
        self._on_epoch_end()
        self.call("on_train_epoch_end", None)

    def _on_epoch_end(self) -> None:
        if self.epoch_ends_last:
            call_all(self.trainer, "on_epoch_end")

    on_validation_epoch_end = on_test_epoch_end = _on_epoch_end

    def on_train_end(self) -> None:
        self.source.on_train_end()
        self.usual.on_train_end()


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a step's arguments as a dictionary; the order of the arguments is kept."""
    return {**dict(zip(("batch", "batch_idx", "dataloader_idx"), args, strict=False)), **kwargs}
