"""DeepSpeed on two processes of the CPU: the suite for strategies, and what is particular about its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.strategies.deepspeed import DeepSpeedStrategy
from drivetrain.testing._regression import BATCHES, Small, whole
from drivetrain.testing.strategy_conformance import Saves, StrategyConformance, needs_every_rank, same


def complete(strategy: Any, optimizer: Any) -> tuple[Any, Any]:
    """Weights and optimizer states as a checkpoint has them, on every rank."""
    parts = strategy.lightning_module_state_dict(), strategy.optimizer_state(optimizer).get("state")
    found: tuple[Any, Any] = strategy.broadcast(parts)
    return found


class Suite(StrategyConformance):
    """The rows of the suite, where DeepSpeed's engine does what they ask; the others say what is refused."""

    devices = 2
    precision = "32-true"
    tolerance = 1e-5

    def fit(self, module: Small, trainer: Any = None, **arguments: Any) -> dict[str, Any]:
        trainer = trainer or self.trainer(**{"max_epochs": arguments.pop("max_epochs", 2), **_without(arguments)})
        trainer.fit(module, self.loader(), self.loader(2), ckpt_path=arguments.get("ckpt_path"))
        weights, states = complete(trainer.strategy, trainer.optimizers[0])
        losses = [loss.cpu() for loss in module.losses]
        everyones = trainer.strategy.gather_objects(torch.stack(losses) if losses else torch.zeros(0))
        return {
            "weights": weights, "optimizer": whole(states), "losses": torch.stack(everyones).mean(0), "gradients": [],
            "steps": trainer.global_step,
        }  # fmt: skip

    def compare(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        super().compare(found, {**expected, "gradients": []})  # the engine has cleared, or cut up, what hooks could see

    def reference_of(self, module: Small) -> Small:
        strategy: Any = module.trainer.strategy
        plain = self.plain_module()
        plain.load_state_dict(strategy.broadcast(strategy.lightning_module_state_dict()))
        return plain

    @needs_every_rank
    def test_it_clips(self, folder: Path) -> None:
        """By the norm of the whole gradient; by value is refused."""
        found = self.fit(Small(), accumulate_grad_batches=4, gradient_clip_val=0.05)
        self.compare(found, self.plain_loop(accumulate=4, clip=("norm", 0.05)))
        with pytest.raises(ConfigurationError, match='Write gradient_clip_algorithm="norm"'):
            self.fit(Small(), gradient_clip_val=0.05, gradient_clip_algorithm="value")

    @needs_every_rank
    def test_manual_optimization_works(self, folder: Path) -> None:
        """It is refused."""
        with pytest.raises(ConfigurationError, match="automatic_optimization = False"):
            self.fit(Small("manual"))

    @needs_every_rank
    def test_it_resumes_exactly(self, folder: Path) -> None:
        """From an epoch's end and its middle; an open window cannot be saved."""
        for at in (6, 9):
            uninterrupted = self.fit(Small(), callbacks=[Saves(folder / f"{at}.ckpt", at)])
            resumed = self.fit(Small(), ckpt_path=folder / f"{at}.ckpt")
            same(len(resumed["losses"]), 2 * BATCHES - at, "batches of the resumed run")
            for part in ("weights", "optimizer"):
                torch.testing.assert_close(resumed[part], uninterrupted[part], rtol=0, atol=0)
        with pytest.raises(CheckpointError, match="Save after an optimizer step"):
            self.fit(Small(), accumulate_grad_batches=4, callbacks=[Saves(folder / "open.ckpt", 9)])


def _without(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "ckpt_path"}


class TestStage1(Suite):
    @staticmethod
    def strategy() -> DeepSpeedStrategy:
        return DeepSpeedStrategy(stage=1)


class TestStage2(Suite):
    @staticmethod
    def strategy() -> DeepSpeedStrategy:
        return DeepSpeedStrategy(stage=2)


class TestStage3(Suite):
    @staticmethod
    def strategy() -> DeepSpeedStrategy:
        return DeepSpeedStrategy(stage=3)
