"""The Trainer of the 1.1 generation: its flags, its calls and its properties, on today's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.legacy.v1_1 import flags
from drivetrain.legacy.v1_1._callbacks import ModelCheckpoint
from drivetrain.legacy.v1_3.trainer import FlaggedTrainer, signature_of


class Trainer(FlaggedTrainer):
    """Today's Trainer with the flags of the 1.1 generation; each one that is deprecated says what to write instead.

    Flags that were not given have the defaults of that time. Today's arguments work too.
    """

    flags_of_that_time = flags.FLAGS
    default_checkpoint = ModelCheckpoint
    takes_dictionaries = True

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.accelerator_backend.trainer = self

    @staticmethod
    def translated(given: Mapping[str, Any]) -> dict[str, Any]:
        return flags.translated(given)

    def fit(self, model: Any, *args: Any, **more: Any) -> Any:
        """Train ``model``; returns 1, as it did."""
        if (automatic := self._flags["automatic_optimization"]) is not None:
            model.automatic_optimization = automatic
        return super().fit(model, *args, **more)

    @property
    def accelerator_backend(self) -> Any:
        """The accelerator."""
        return self.strategy.source  # type: ignore[attr-defined]

    @property
    def distributed_backend(self) -> str | None:
        """The accelerator's nickname."""
        nickname: str | None = self.accelerator_backend.nickname
        return nickname

    @property
    def data_parallel(self) -> bool:
        """Whether several devices train together."""
        return self.strategy.facts.is_distributed or self.distributed_backend == "dp"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop of the run that :meth:`fit` has begun: for an accelerator's ``train``; so are the two others."""
        return self.accelerator_backend.train_or_test()

    run_test = run_evaluation = train


Trainer.__init__.__signature__ = signature_of(flags.FLAGS)  # type: ignore[attr-defined]
