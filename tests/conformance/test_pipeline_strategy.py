"""The suite for strategies on a pipeline, whose steps run stages and whose processes hold different parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import PipelineStrategy
from drivetrain.testing._regression import BATCHES, GLOBAL_BATCH, Small, data, weighted, whole
from drivetrain.testing.strategy_conformance import StrategyConformance, needs_every_rank, same


class ScaledHead(nn.Module):
    """What follows ``net`` in Small."""

    def __init__(self, scale: nn.Parameter, head: nn.Module) -> None:
        super().__init__()
        self.scale, self.head = scale, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)  # type: ignore[no-any-return]


class Staged(Small):
    """Small in two stages. A pipeline calls them, and the loss function, instead of ``training_step``."""

    def configure_pipeline(self, num_stages: int) -> Any:
        return [self.net, ScaledHead(self.scale, self.head)], self.loss

    def loss(self, output: Tensor, y: Tensor, tokens: Tensor) -> Any:
        return weighted(output, y, tokens) if self.kind == "weighted" else F.mse_loss(output, y)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "failing" and self.losses:
            raise ZeroDivisionError

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kind != "weighted":
            self.losses.append(outputs["loss"].detach())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.inference.add(torch.is_inference_mode_enabled())
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]


class MakesStages(Callback):
    """Makes the module of a row, which overrides of Small what the row is about, one that also has stages."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        own = type(pl_module)
        if not isinstance(pl_module, Staged):
            pl_module.__class__ = Staged if own is Small else type(own.__name__, (own, Staged), {})


class TestPipeline(StrategyConformance):
    """The rows, on complete weights that are gathered from both stages."""

    strategy: Callable[[], PipelineStrategy] = PipelineStrategy  # type: ignore[assignment]
    devices = 2
    test_an_engine_trains_like_the_plain_loop: Any = None  # a step of its own, which only a Trainer runs
    test_an_engine_resumes_exactly: Any = None

    def loader(self, batches: int = BATCHES) -> Any:
        """Both processes see the same samples."""
        return DataLoader(data(batches), batch_size=GLOBAL_BATCH)

    def trainer(self, strategy: Any = None, **arguments: Any) -> Any:
        return super().trainer(strategy, **{**arguments, "callbacks": [MakesStages(), *arguments.get("callbacks", [])]})

    def fit(self, module: Small, trainer: Any = None, **arguments: Any) -> dict[str, Any]:
        ckpt_path = arguments.pop("ckpt_path", None)
        trainer = trainer or self.trainer(**arguments)
        trainer.fit(module, self.loader(), self.loader(2), ckpt_path=ckpt_path)
        strategy = trainer.strategy
        weights, state = strategy.broadcast(
            (strategy.lightning_module_state_dict(), strategy.optimizer_state(trainer.optimizers[0]).get("state"))
        )
        each = strategy.world.gather_objects(module.gradients)  # of its own parameters on each rank, None of the others
        gradients = [
            {name: next(part[name] for part in parts if part[name] is not None) for name in parts[0]}
            for parts in zip(*each, strict=True)
        ]
        return {
            "weights": weights, "optimizer": whole(state), "gradients": gradients, "steps": trainer.global_step,
            "losses": torch.stack([loss.cpu() for loss in module.losses]) if module.losses else torch.zeros(0),
        }  # fmt: skip

    def reference_of(self, module: Small) -> Small:
        strategy: Any = module.trainer.strategy
        plain = self.plain_module()
        plain.load_state_dict(strategy.broadcast(strategy.lightning_module_state_dict()))
        return plain

    @needs_every_rank
    def test_manual_optimization_works(self, folder: Path) -> None:
        """It is refused."""
        with pytest.raises(ConfigurationError, match="automatic_optimization"):
            self.fit(Small("manual"))

    @needs_every_rank
    def test_a_run_gives_the_module_back(self, folder: Path) -> None:
        """The module stays spread over the processes, and trains again."""
        module = Small()
        self.fit(module, max_epochs=1)
        same({parameter.device.type for parameter in module.parameters()}, {"cpu", "meta"}, "devices after the run")
        self.fit(module, max_epochs=1)
        same(len(module.losses), 2 * BATCHES, "batches of both runs")
