"""drivetrain's Trainer with the flags, methods and properties of Lightning 1.1's Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drivetrain.base.introspect import reads
from drivetrain.legacy.v1_1 import flags
from drivetrain.legacy.v1_1._callbacks import ModelCheckpoint
from drivetrain.legacy.v1_3.trainer import FlaggedTrainer, signature_of


class Trainer(FlaggedTrainer):
    """drivetrain's Trainer with the flags of Lightning 1.1; a deprecated flag causes a warning with the replacement.

    Omitted flags have the defaults of Lightning 1.1. drivetrain's own arguments are also accepted.
    """

    flags_of_that_time = flags.FLAGS
    default_checkpoint = ModelCheckpoint
    takes_dictionaries = True
    translated = staticmethod(flags.translated)

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.accelerator_backend.trainer = self
        facts = self.strategy.facts
        self.strategy.facts = facts.but(earlier=replace(facts.earlier, clears_last=True))

    def fit(self, model: Any, *args: Any, **more: Any) -> Any:
        """Train ``model``; return 1, as in 1.1."""
        if (automatic := self._flags["automatic_optimization"]) is not None:
            model.automatic_optimization = automatic
        return super().fit(model, *args, **more)

    accelerator_backend: Any = reads("strategy.source", "The accelerator.")
    distributed_backend: str | None = reads("strategy.source.nickname", "The accelerator's nickname.")

    @property
    def data_parallel(self) -> bool:
        """Whether the run uses several devices."""
        return self.strategy.facts.is_distributed or self.distributed_backend == "dp"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop that :meth:`fit` has started. The accelerator's ``train`` calls this method,
        :meth:`run_evaluation` or :meth:`run_test`.
        """
        return self.accelerator_backend.train_or_test()

    run_test = run_evaluation = train


Trainer.__init__.__signature__ = signature_of(flags.FLAGS)  # type: ignore[attr-defined]
