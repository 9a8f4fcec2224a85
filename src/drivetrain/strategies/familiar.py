"""A strategy's members under Lightning's names, such as ``reduce``. They call drivetrain's own methods for the same
purpose.

Users call and override the members of the class ``Familiar``. drivetrain itself calls the functions below the class.
Such a function calls a user's override if there is one, and otherwise drivetrain's own method.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import parity
from drivetrain.base import no_init
from drivetrain.base.introspect import defined_by_user, overrides, reads, temporarily
from drivetrain.data import samplers
from drivetrain.precision.precision import Precision
from drivetrain.strategies.collectives import operation_of
from drivetrain.strategies.group import Group
from drivetrain.strategies.placement import place
from drivetrain.strategies.state import State
from drivetrain.strategies.step import Step, differentiates_itself

if TYPE_CHECKING:
    from drivetrain.strategies.strategy import Strategy

_DECLARED = {
    "restore_checkpoint_after_setup": "restores_after_setup",
    "lightning_restore_optimizer": "trainer_restores_optimizers",
    "handles_gradient_accumulation": "handles_gradient_accumulation",
}


COLLECTIVES = frozenset({"barrier", "broadcast", "reduce_boolean_decision"})
"""If a strategy overrides one of these members, the group :attr:`Strategy.world` also calls the override."""


class Familiar(Step, State):
    """A strategy's members that have one name in Lightning and another name in drivetrain."""

    is_distributed: Any = reads("facts.is_distributed", "Several processes train together.")
    restore_checkpoint_after_setup: Any = reads("facts.restores_after_setup", "Weights are loaded after ``setup``.")
    lightning_restore_optimizer: Any = reads("facts.trainer_restores_optimizers", "A Trainer restores optimizers.")
    handles_gradient_accumulation: Any = reads("facts.handles_gradient_accumulation", "Optimizers add up gradients.")
    precision: Any = reads("precision_plugin", "``precision_plugin`` under its name in Fabric.")

    # ---- ranks and places ----------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is global rank 0."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a DistributedSampler. Ranks that must get the same samples have the same ``rank`` here."""
        return {"num_replicas": self.data.size, "rank": self.data.index}

    @property
    def device_mesh(self) -> Any:
        """The device mesh of a strategy that shards the model; ``None`` for any other strategy."""
        return None

    def model_to_device(self) -> None:
        """Move the model to the root device."""
        assert self.model is not None  # connect() has run
        place(self.model, self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context in which ``configure_model`` runs: new tensors get the strategy's device and precision.

        Args:
            empty_init: leave the parameters of new layers uninitialized, because a checkpoint will be loaded.
        """
        drawn = no_init.NoInit() if empty_init else nullcontext()
        with self.root_device, self.precision_plugin.tensor_init_context() or nullcontext(), drawn:
            yield

    # ---- between ranks -------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for every rank. Further arguments are ignored, because other libraries' barriers have different
        arguments.
        """
        self._plain_world.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s ``obj`` on every rank."""
        return self._plain_world.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is true on all ranks. With ``all=False``, return whether ``decision`` is true on
        at least one rank. Every rank gets the same result.
        """
        return self._plain_world.reduce_boolean_decision(decision, all)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce ``tensor`` over the ranks of ``group``, or over all ranks. A value that is no tensor is returned
        unchanged.

        Raises:
            UnknownNameError: the operation ``reduce_op`` is unknown, even in a job with one process.
        """
        operation_of(reduce_op)
        return self._group_of(group).all_reduce(tensor, reduce_op) if isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the stacked tensors of the ranks of ``group``, or of all ranks. With one rank, return the tensor
        itself.
        """
        ranks = self._group_of(group)
        return tensor if ranks.size == 1 else ranks.all_gather(tensor, sync_grads)

    def _group_of(self, group: Any) -> Group:
        """Return the :class:`Group` for ``group``: a Group, a process group of torch.distributed, or ``None`` for all
        ranks.
        """
        return group if isinstance(group, Group) else self._plain_world

    # ---- a step --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` with those of ``args`` that the method accepts."""
        return self._run_step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step``."""
        return self._run_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step``."""
        return self._run_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step``."""
        return self._run_step("predict_step", *args, **kwargs)

    def _run_step(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        with getattr(self.precision_plugin, _STEP_CONTEXTS[name])():
            return self._module_step(name)(*args, **kwargs)

    def _module_step(self, name: str) -> Callable[..., Any]:
        return self.driver.steps.get(name) or self.bind(name)

    def post_training_step(self) -> None:
        """Called between ``training_step`` and the backward pass."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Called before a backward pass."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Called after a backward pass."""

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Context in which backward passes of the run's model do not exchange gradients."""
        assert self.model is not None  # setup() has run
        return self.accumulating(self.model)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients, before the first backward pass for an optimizer step."""
        optimizer.zero_grad()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        """Clip this optimizer's gradients by their total norm, and return the norm before clipping."""
        return self.clip_gradients(module, optimizer, max_norm, "norm", norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of this optimizer's gradients to ``clip_val``."""
        self.clip_gradients(module, optimizer, clip_val, "value")

    def setup_precision_plugin(self) -> None:
        """Let the precision replace the model, the optimizers or the schedulers of the run. Called after model,
        optimizers and schedulers were created.
        """
        precision, model = self.precision_plugin, self.model
        if model is not None and overrides(precision, "connect", Precision):
            self.model, self.optimizers, self.lr_scheduler_configs = precision.connect(
                model, self.optimizers, self.lr_scheduler_configs
            )

    # ---- state of the run's module and optimizers ----------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the run's module. Every rank must call this method."""
        return self.module_state(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load ``checkpoint["state_dict"]`` into the run's module."""
        self.load_module_state(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load ``checkpoint["optimizer_states"]``, one entry for each optimizer of the run."""
        self.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"], checkpoint.get("state_dict", {}))

    # ---- phases of a run -----------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Called after ``on_train_start`` of the callbacks and the module. The methods below are also called after the
        hooks of the same name.
        """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a batch if a subclass overrides this method."""

    def on_train_end(self) -> None:
        """Called after training."""

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation."""

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing."""

    def on_predict_start(self) -> None:
        """Called before prediction."""

    def on_predict_end(self) -> None:
        """Called after prediction."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run ends with ``exception``."""


# ---- how the library calls overrides of these names: collectives ----------------------------------------------------


def own_collectives(strategy: Strategy, world: Group) -> Group:
    """Return ``world``. If the strategy overrides one of :data:`COLLECTIVES`, return a copy of ``world`` that calls the
    strategy's methods.
    """
    if not any(overrides(strategy, name, Familiar) for name in COLLECTIVES):
        return world
    asks: Any = copy.copy(world)  # the copy keeps the class and all other methods of ``world``
    asks.barrier, asks.reduce_boolean_decision = strategy.barrier, strategy.reduce_boolean_decision
    asks.broadcast = lambda obj, src=None: strategy.broadcast(obj, world.ranks[0] if src is None else src)
    return asks


def own_reduce(strategy: Strategy) -> Callable[..., Any] | None:
    """Return the strategy's ``reduce`` if logged values must be reduced with it, else ``None``."""
    own = defined_by_user(strategy, "reduce") or strategy.facts.earlier.reduces
    return strategy.reduce if own else None


def share(strategy: Strategy, loader: Any, splits: bool = False, pads: bool = False) -> Any:
    """Return ``loader``, or a copy that yields this rank's part of the data: see
    :func:`drivetrain.data.samplers.share`.
    """
    if not strategy.facts.is_distributed or not (mine := strategy.distributed_sampler_kwargs):
        return loader

    world, pads = strategy.world, pads or parity.current().padded_evaluation
    part = samplers.share(
        loader, mine["rank"], mine["num_replicas"], world.broadcast, splits, pads, draws=world.index == 0
    )
    return loader if part is None else part


def part_of_data(strategy: Strategy) -> int | None:
    """Return the index of this rank's part of the data; ``None`` with one process."""
    if not strategy.facts.is_distributed:
        return None
    return int(strategy.distributed_sampler_kwargs.get("rank", strategy.data.index))


# ---- in a step -------------------------------------------------------------------------------------------------------


def bind_step_of(strategy: Strategy, name: str) -> Callable[..., Any]:
    """Return the function that runs the step ``name``: the strategy's override of the step, or else the
    module's step.
    """
    bound = strategy.driver.steps[name] = strategy.bind(name)
    step: Callable[..., Any] = getattr(strategy, name) if overrides(strategy, name, Familiar) else bound
    if enters_step_contexts(strategy) and not strategy.facts.earlier.enters_contexts:
        step = _in_context(step, getattr(strategy.precision_plugin, _STEP_CONTEXTS[name]))
    if name == "training_step" and overrides(strategy, "post_training_step", Familiar):
        step = then(step, strategy.post_training_step)
    return step


def enters_step_contexts(strategy: Strategy) -> bool:
    """Whether steps run in contexts that a user's precision overrides, or that the strategy's own steps enter."""
    own = any(
        defined_by_user(strategy.precision_plugin, name) for name in ("forward_context", *_STEP_CONTEXTS.values())
    )
    return own or strategy.facts.earlier.enters_contexts


def _in_context(step: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    def step_in_context(*args: Any, **kwargs: Any) -> Any:
        with context():
            return step(*args, **kwargs)

    return step_in_context


def then(first: Callable[..., Any], second: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that calls ``first``, then calls ``second``, and returns the result of ``first``."""

    def both(*args: Any, **kwargs: Any) -> Any:
        output = first(*args, **kwargs)
        second()
        return output

    return both


def bind_backward(
    strategy: Strategy, differentiate: Callable[..., Any], optimizer: Optimizer | None
) -> Callable[..., Any]:
    """Return the function ``(loss, *args, **kwargs)`` for backward passes. If the strategy overrides ``backward``, the
    function calls the override. Otherwise it calls ``differentiate`` between ``pre_backward`` and ``post_backward``.
    """
    if differentiates_itself(strategy):
        own = strategy.backward
        return lambda loss, *args, **kwargs: own(loss, optimizer, *args, **kwargs)
    if not _surrounds_backward(strategy):
        return differentiate

    def between(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        strategy.pre_backward(loss)
        differentiate(loss, *args, **kwargs)
        strategy.post_backward(loss)

    return between


def differentiates_plainly(strategy: Strategy) -> bool:
    """Whether a backward pass of this strategy and its precision is only ``loss.backward()``."""
    precision = strategy.precision_plugin
    scales = precision.scales_loss or overrides(precision, "backward", Precision)
    return not (scales or differentiates_itself(strategy) or _surrounds_backward(strategy))


def _surrounds_backward(strategy: Strategy) -> bool:
    return any(overrides(strategy, name, Familiar) for name in ("pre_backward", "post_backward"))


def bind_zero_grad(strategy: Strategy, optimizer: Optimizer) -> Callable[[], None]:
    """Return the function that clears the gradients of ``optimizer``."""
    own = overrides(strategy, "zero_grad", Familiar)
    return functools.partial(strategy.zero_grad, optimizer) if own else optimizer.zero_grad


def bind_clipping(strategy: Strategy, module: nn.Module, algorithm: Any) -> Callable[..., Any]:
    """Return the function ``(optimizer, clip_val, algorithm)`` that clips gradients: the strategy's override, or the
    precision's method.
    """
    verb = "clip_gradients_value" if algorithm == "value" else "clip_gradients_norm"
    if overrides(strategy, verb, Familiar):
        familiar = getattr(strategy, verb)
        return lambda optimizer, clip_val, algorithm: familiar(module, optimizer, clip_val)
    if overrides(strategy, "clip_gradients", Step):
        return functools.partial(strategy.clip_gradients, module)
    clip = strategy.precision_plugin.clip_gradients
    return clip if algorithm == "value" else lambda optimizer, clip_val, algorithm: clip(optimizer, clip_val)


def bind_accumulating(strategy: Strategy, model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a function that creates a context without exchange of gradients in backward passes. ``None``: the strategy
    has none.
    """
    if overrides(strategy, "block_backward_sync", Familiar):  # the override only supports ``strategy.model``
        return functools.partial(_blocking, strategy, model)
    return functools.partial(strategy.accumulating, model) if overrides(strategy, "accumulating", Step) else None


@contextmanager
def _blocking(strategy: Strategy, model: nn.Module) -> Iterator[None]:
    with temporarily(vars(strategy), model=model), strategy.block_backward_sync():
        yield


_STEP_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}

# ---- state -----------------------------------------------------------------------------------------------------------


def module_state(strategy: Strategy, module: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Return the state of ``module`` for a checkpoint; ``model`` is the strategy's wrapper of ``module``."""
    if not overrides(strategy, "lightning_module_state_dict", Familiar):
        return strategy.module_state(module)
    with temporarily(vars(strategy), lightning_module=module, model=model):
        return strategy.lightning_module_state_dict()


def load_module_state(
    strategy: Strategy, module: nn.Module, model: nn.Module, state: Mapping[str, Any], strict: bool
) -> None:
    """Load ``state``, a result of :func:`module_state`, into ``module``."""
    if not overrides(strategy, "load_model_state_dict", Familiar):
        strategy.load_module_state(module, state, strict)
        return
    with temporarily(vars(strategy), lightning_module=module, model=model):
        strategy.load_model_state_dict({"state_dict": state}, strict=strict)


def optimizer_state(strategy: Strategy, optimizer: Optimizer, module: nn.Module | None) -> dict[str, Any]:
    """Return the state of an optimizer of ``module``'s parameters, for a checkpoint."""
    with temporarily(vars(strategy), lightning_module=module):  # Lightning's method has no argument for the module
        return strategy.optimizer_state(optimizer)


def load_optimizer_state(
    strategy: Strategy, optimizer: Optimizer, module: nn.Module | None, state: Mapping[str, Any]
) -> None:
    """Load ``state``, a result of :func:`optimizer_state`, into ``optimizer``."""
    if not overrides(strategy, "load_optimizer_state_dict", Familiar):
        strategy.load_optimizer_states([optimizer], [state], {})
        return
    with temporarily(vars(strategy), lightning_module=module, optimizers=[optimizer]):
        strategy.load_optimizer_state_dict({"optimizer_states": [state]})


def read_overrides(strategy: Strategy) -> None:
    """If the strategy overrides a member such as ``restore_checkpoint_after_setup``, store the member's value in
    ``strategy.facts``. Called when a run begins.
    """
    own = type(strategy)
    overridden = {name: fact for name, fact in _DECLARED.items() if getattr(own, name) is not vars(Familiar)[name]}
    if overridden:
        strategy.facts = strategy.facts.but(**{fact: getattr(strategy, name) for name, fact in overridden.items()})
