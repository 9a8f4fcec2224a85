"""Members of the field's strategies under their names there, on top of this contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.base.introspect import overrides
from drivetrain.strategies.facts import Facts
from drivetrain.strategies.placement import place

if TYPE_CHECKING:
    from drivetrain.strategies.strategy import Strategy

_DECLARED = {
    "restore_checkpoint_after_setup": "restores_after_setup",
    "lightning_restore_optimizer": "trainer_restores_optimizers",
    "handles_gradient_accumulation": "handles_gradient_accumulation",
}


class Familiar:
    """What the field's strategies have, and this contract says in another way: callable, and honoured if overridden."""

    facts: Facts
    lightning_module: Any
    optimizers: list[Optimizer]
    model: nn.Module | None
    global_rank: int
    root_device: Any
    data: Any
    module_state: Any
    load_module_state: Any
    load_optimizer_states: Any

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        return self.facts.is_distributed

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded after ``setup``."""
        return self.facts.restores_after_setup

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the Trainer restores optimizers."""
        return self.facts.trainer_restores_optimizers

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the strategy's optimizers add up the gradients of a window themselves."""
        return self.facts.handles_gradient_accumulation

    # ---- ranks and places ----------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is global rank 0."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a DistributedSampler; ranks with the same ``rank`` get the same samples, augmented alike."""
        return {"num_replicas": self.data.size, "rank": self.data.index}

    def model_to_device(self) -> None:
        """Move the model to the root device."""
        assert self.model is not None  # connect() came first
        place(self.model, self.root_device)

    # ---- state of the run's module and optimizers ----------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the run's module; every rank must call it."""
        state: dict[str, Any] = self.module_state(self.lightning_module)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load ``checkpoint["state_dict"]`` into the run's module."""
        self.load_module_state(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load ``checkpoint["optimizer_states"]``, one entry for each optimizer of the run."""
        self.load_optimizer_states(self.optimizers, checkpoint["optimizer_states"], checkpoint.get("state_dict", {}))

    # ---- moments of a run ----------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """After the callbacks' and the module's hook of this name; so do the others."""

    def on_train_end(self) -> None:
        """Training has ended."""

    def on_validation_start(self) -> None:
        """Validation begins."""

    def on_validation_end(self) -> None:
        """Validation has ended."""

    def on_test_start(self) -> None:
        """Testing begins."""

    def on_test_end(self) -> None:
        """Testing has ended."""

    def on_predict_start(self) -> None:
        """Prediction begins."""

    def on_predict_end(self) -> None:
        """Prediction has ended."""

    def on_exception(self, exception: BaseException) -> None:
        """The run ends by ``exception``."""


# ---- overrides under these names, for the callers of the contract ----------------------------------------------------


def module_state(strategy: Strategy, module: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint holds of ``module``, of which the strategy has made ``model``."""
    if not _own(strategy, "lightning_module_state_dict"):
        return strategy.module_state(module)
    with standing_for(strategy, lightning_module=module, model=model):
        return strategy.lightning_module_state_dict()


def load_module_state(
    strategy: Strategy, module: nn.Module, model: nn.Module, state: Mapping[str, Any], strict: bool
) -> None:
    """Load what :func:`module_state` returned."""
    if not _own(strategy, "load_model_state_dict"):
        strategy.load_module_state(module, state, strict)
        return
    with standing_for(strategy, lightning_module=module, model=model):
        strategy.load_model_state_dict({"state_dict": state}, strict=strict)


def optimizer_state(strategy: Strategy, optimizer: Optimizer, module: nn.Module | None) -> dict[str, Any]:
    """Return what a checkpoint holds of an optimizer of the parameters of ``module``."""
    with standing_for(strategy, lightning_module=module):  # the verb of this contract is the field's
        return strategy.optimizer_state(optimizer)


def load_optimizer_state(
    strategy: Strategy, optimizer: Optimizer, module: nn.Module | None, state: Mapping[str, Any]
) -> None:
    """Load what :func:`optimizer_state` returned."""
    if not _own(strategy, "load_optimizer_state_dict"):
        strategy.load_optimizer_states([optimizer], [state], {})
        return
    with standing_for(strategy, lightning_module=module, optimizers=[optimizer]):
        strategy.load_optimizer_state_dict({"optimizer_states": [state]})


def _own(strategy: Strategy, name: str) -> bool:
    return overrides(strategy, name, Familiar)


@contextmanager
def standing_for(strategy: Strategy, **attributes: Any) -> Iterator[None]:
    """Context in which a strategy has other attributes: methods under these names know one module, that of the run."""
    # In the instance's dictionary: a setter would do to them what is to be done once, at the start of a run.
    own = vars(strategy)
    before = {name: own[name] for name in attributes if name in own}
    own.update({name: attributes[name] for name in before})
    try:
        yield
    finally:
        own.update(before)


def read_overrides(strategy: Strategy) -> None:
    """Let overrides of familiar members change what the strategy declares; called when a run begins."""
    own = type(strategy)
    overridden = {name: fact for name, fact in _DECLARED.items() if getattr(own, name) is not vars(Familiar)[name]}
    if overridden:
        strategy.facts = strategy.facts.but(**{fact: getattr(strategy, name) for name, fact in overridden.items()})
