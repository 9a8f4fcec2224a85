"""Steps that a strategy owns, and buffers that ranks do not share, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer, WeightedLoss
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DDPStrategy, ParallelStrategy
from drivetrain.strategies.step_parts import StepParts


def loader(count: int = 48) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 9, (count,), generator=generator)
    data = TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator), weights
    )
    return DataLoader(data, batch_size=4)


class Weighted(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weights = batch
        each = (self.net(x) - y).square().squeeze(1)
        return WeightedLoss((each * weights).sum() / weights.sum(), int(weights.sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByParts(DDPStrategy):
    """Each batch in ``pieces``; all passes exchange gradients, or with ``holds`` only the last of a window."""

    facts = DDPStrategy.facts.but(honoured_hooks=StepParts.HOOKS)

    def __init__(self, pieces: int, holds: bool | str) -> None:
        super().__init__()
        self.pieces, self.holds = pieces, holds

    def bind_step(self, parts: StepParts) -> Any:
        def step(batch: Any, batch_idx: int, index: int, last: bool, size: int) -> Any:
            pieces = list(zip(*(tensor.chunk(self.pieces) for tensor in batch), strict=True))
            if index == 0:
                parts.begin(size * len(pieces))
            for number, piece in enumerate(pieces):
                at, ends = index * len(pieces) + number, last and number == len(pieces) - 1
                holds = self.holds is True or (self.holds == "second" and at == 1)

                def run(piece: Any = piece, at: int = at, ends: bool = ends) -> Any:
                    output = parts.training_step(piece, batch_idx)
                    parts.backward(parts.loss_of(output, at, ends))  # type: ignore[arg-type]
                    return output

                if holds and not ends:
                    with parts.accumulating():
                        output = run()
                else:
                    output = run()
            if last:
                parts.before_step()
            return output, int(last and parts.optimizer_step())

        return step


def fitted(strategy: Any, accumulate: int, **arguments: Any) -> Any:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision="64-true", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulate, **arguments,
    )  # fmt: skip
    module = Weighted()
    trainer.fit(module, loader())
    return module.state_dict()


def differences(pieces: int, holds: bool, accumulate: int) -> float:
    expected, found = fitted("ddp", accumulate), fitted(ByParts(pieces, holds), accumulate)
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize(("pieces", "holds", "accumulate"), [(1, False, 3), (1, True, 3), (2, False, 1), (2, True, 2)])
def test_weighted_losses_are_weighed_once_however_often_gradients_are_exchanged(
    pool: Any, pieces: int, holds: bool, accumulate: int
) -> None:
    assert max(pool.run(differences, pieces, holds, accumulate, group=False)) < 1e-12


def mixed() -> str:
    with pytest.raises(ConfigurationError) as caught:
        fitted(ByParts(1, "second"), 4)
    return str(caught.value)


def test_passes_that_exchange_and_passes_that_do_not_are_an_error(pool: Any) -> None:
    for message in pool.run(mixed, group=False):
        assert "Run all of them inside parts.accumulating(), or none" in message


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Averaging(ParallelStrategy):
    """Averages gradients, and leaves buffers to each rank."""

    def post_backward(self, closure_loss: Tensor) -> None:
        for parameter in self.lightning_module.parameters():
            parameter.grad = self.data.all_reduce(parameter.grad, "mean")


class Running(LightningModule):
    """A running mean that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.validated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean.lerp_(batch[0].mean(0), 0.1)
        return (self.layer(batch[0] - self.mean) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.mean.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def trained(path: Path | None = None, resumes: bool = False, **arguments: Any) -> Running:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=Averaging(), max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=None if path is None or resumes else Saves(path), **arguments,
    )  # fmt: skip
    module = Running()
    trainer.fit(module, loader(), loader(8), ckpt_path=path if resumes else None)
    return module


def resumed(folder: Path) -> tuple[Any, Any, list[Tensor]]:
    whole = trained(folder / "inside.ckpt")
    again = trained(folder / "inside.ckpt", resumes=True)
    return whole.state_dict(), again.state_dict(), whole.validated


def test_buffers_that_ranks_do_not_share_come_back_and_validation_takes_those_of_rank_0(
    pool: Any, tmp_path: Path
) -> None:
    (whole, again, validated), (whole_1, again_1, validated_1) = pool.run(resumed, tmp_path, group=False)
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    torch.testing.assert_close(again_1, whole_1, rtol=0, atol=0)
    assert validated
    torch.testing.assert_close(validated, validated_1, rtol=0, atol=0)


def asks_for_sync() -> str:
    with pytest.raises(ConfigurationError) as caught:
        trained(sync_batchnorm=True)
    return str(caught.value)


def test_a_strategy_that_does_not_synchronise_batch_norm_says_so(pool: Any) -> None:
    for message in pool.run(asks_for_sync, group=False):
        assert "which Averaging does not do" in message
