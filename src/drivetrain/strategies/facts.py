"""Facts that a strategy declares about itself. drivetrain reads these facts before and during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from drivetrain.accelerators.accelerator import Accelerator
    from drivetrain.checkpoints.io import CheckpointIO
    from drivetrain.precision.precision import Precision
    from drivetrain.strategies.group import Group
    from drivetrain.strategies.step_parts import Driver


@dataclass(frozen=True)
class Earlier:
    """Features of earlier Lightning versions that a strategy's steps use.

    Attributes:
        step_ends: the strategy splits batches, and calls the module's ``training_step_end``, ``validation_step_end``
            and ``test_step_end`` with the outputs of all parts. If False, a module that defines one of these methods
            causes an error.
        zero_grad: the strategy's ``zero_grad`` calls the module's ``optimizer_zero_grad``. If False, the module's
            method is called instead of the strategy's method.
        clears_last: the strategy's ``optimizer_step`` ends with ``on_before_zero_grad`` and the module's
            ``optimizer_zero_grad``. If False, the loop calls both before the first backward pass for each optimizer
            step.
        hooks: further methods of a module or a callback that the strategy calls. With any other strategy, a module that
            defines one of these methods causes an error. A callback that defines one of these methods causes a warning.
        step_arguments: the names of further arguments of ``training_step``.
        enters_contexts: the strategy's own steps enter the precision's contexts, so drivetrain does not enter these
            contexts.
        reduces: the strategy's ``reduce`` also reduces logged values.
    """

    step_ends: bool = False
    zero_grad: bool = False
    clears_last: bool = False
    hooks: frozenset[str] = frozenset()
    step_arguments: frozenset[str] = frozenset()
    enters_contexts: bool = False
    reduces: bool = False


@dataclass(frozen=True)
class Facts:
    """Facts that a strategy's class declares: ``facts = ParallelStrategy.facts.but(calls_through_forward=True)``.

    A constructor may set ``self.facts`` if the facts depend on its arguments.

    Attributes:
        is_distributed: several processes train together.
        drives_all_devices: one process trains on all devices of its machine. If False, each device has its own process.
        accelerators: the names or device types of the supported accelerators. If empty, the strategy supports all
            accelerators that need no special strategy.
        start_method: how the strategy starts processes if no launcher has started them: "popen", "spawn", "fork",
            "forkserver" or "ray". ``None``: the strategy starts no processes.
        restores_after_setup: the Trainer reads a checkpoint and loads the weights after ``setup``. If False, the
            Trainer does this before ``setup``. Must be True if ``setup`` shards the model, or if ``load_checkpoint``
            fills the model in place.
        trainer_restores_optimizers: the Trainer restores optimizers from a checkpoint. If False, the strategy's
            ``load_checkpoint`` restores the optimizers.
        calls_through_forward: steps run inside the module's ``__call__``. FSDP2, for example, needs calls of
            ``__call__``, because FSDP2 adds hooks to the module.
        allows_inference_mode: evaluation can run under ``torch.inference_mode``. If False, evaluation runs under
            ``no_grad``.
        handles_gradient_accumulation: the optimizers themselves accumulate gradients over batches. The loop
            therefore does not divide the loss, and steps the optimizers after each batch.
        honoured_hooks: the hooks that the strategy calls, if it implements the whole step itself. If the module or a
            callback overrides another hook of a step, set-up raises an error. Use ``StepParts.HOOKS`` for the hooks
            that ``StepParts`` calls, and "all" for every hook.
        local_passes: "module:function" for ``Trainer(split_on_oom=True)``. The function returns the
            :class:`~drivetrain.strategies.local_passes.LocalPasses` of this strategy. A ``LocalPasses`` object runs
            passes in which the ranks do not communicate, and one exchange afterwards. If empty, ``split_on_oom=True``
            raises an error.
        refuses: the names of the Trainer's arguments that do not work with the strategy, each with the reason. Possible
            names: "compile", "cuda_graphs", "replay_every", "replica_check_every", "save_trainable_only",
            "split_on_oom".
        engine_verbs: the class that an Engine uses instead of ``Verbs`` to call the strategy's methods. Needed only if
            the signatures of these methods differ from those that a Trainer expects.
        engine_class: "module:class" of the strategy that an Engine creates instead of this strategy. Needed only if an
            Engine cannot use this strategy.
        earlier: facts of a strategy that trains like earlier generations of Lightning.
    """

    is_distributed: bool = False
    drives_all_devices: bool = False
    accelerators: frozenset[str] = frozenset()
    start_method: str | None = None
    restores_after_setup: bool = False
    trainer_restores_optimizers: bool = True
    calls_through_forward: bool = False
    allows_inference_mode: bool = True
    handles_gradient_accumulation: bool = False
    honoured_hooks: frozenset[str] | Literal["all"] = frozenset()
    local_passes: str = ""
    refuses: Mapping[str, str] = field(default_factory=dict)
    engine_verbs: Any = None
    engine_class: str | None = None
    earlier: Earlier = Earlier()

    def but(self, **changes: Any) -> Facts:
        """Return a copy of these facts, with ``changes``."""
        return replace(self, **changes)


# handles_gradient_accumulation is left out, because a strategy may override the property of this name
_NAMES = {each.name for each in fields(Facts)} - {"handles_gradient_accumulation"}


def check_declared(cls: Any) -> None:
    """Check that a strategy's class declares facts only in ``facts``.

    Raises:
        ConfigurationError: the class has an attribute with the name of a fact. drivetrain would not read this
            attribute.
    """
    if wrong := sorted(vars(cls).keys() & _NAMES):
        value = vars(cls)[wrong[0]]
        raise ConfigurationError(
            f"{cls.__name__} declares {wrong[0]} as an attribute of the class. Write it as one of its facts: "
            f"facts = {cls.__mro__[1].__name__}.facts.but({wrong[0]}={value!r})."
        )


class Shared:
    """Declares the types of the attributes that the base classes of :class:`Strategy` share."""

    accelerator: Accelerator | None
    checkpoint_io: CheckpointIO
    driver: Driver
    facts: Facts
    global_rank: int
    lightning_module: Any
    lr_scheduler_configs: list[Any]
    model: nn.Module | None
    model_to_device: Any
    optimizers: list[Optimizer]
    post_backward: Any
    pre_backward: Any
    precision_plugin: Precision

    if TYPE_CHECKING:

        @property
        def _plain_world(self) -> Group: ...

        @property
        def data(self) -> Group: ...

        @property
        def root_device(self) -> torch.device: ...
