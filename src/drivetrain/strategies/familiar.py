"""Members of the field's strategies under their names there, on top of this contract."""

from __future__ import annotations

from drivetrain.strategies.facts import Facts

_DECLARED = {
    "restore_checkpoint_after_setup": "restores_after_setup",
    "lightning_restore_optimizer": "trainer_restores_optimizers",
    "handles_gradient_accumulation": "handles_gradient_accumulation",
}


class Familiar:
    """What the field's strategies have, and this contract says in another way: callable, and honoured if overridden."""

    facts: Facts

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


def read_overrides(strategy: Familiar) -> None:
    """Let overrides of familiar members change what the strategy declares; called when a run begins."""
    own = type(strategy)
    overridden = {name: fact for name, fact in _DECLARED.items() if getattr(own, name) is not vars(Familiar)[name]}
    if overridden:
        strategy.facts = strategy.facts.but(**{fact: getattr(strategy, name) for name, fact in overridden.items()})
