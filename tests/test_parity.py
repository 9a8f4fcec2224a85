"""The switches for what a program written for the original expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer, parity, seed_everything
from drivetrain.errors import CheckpointError
from drivetrain.parity import Parity


@pytest.fixture
def use() -> Iterator[Any]:
    before = parity.current()
    yield lambda **switches: parity.use(Parity(**switches))
    parity.use(before)


class OneWeight(LightningModule):
    """Its gradient is the sum of what the losses are divided by."""

    def __init__(self, frequency: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.frequency = frequency
        self.grads: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.weight.grad is not None
        self.grads.append(float(self.weight.grad))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]


def fitted(
    make_trainer: Any, batches: int, accumulate: int, frequency: int = 1, unsized: bool = False, epochs: int = 1
) -> OneWeight:
    module = OneWeight(frequency)
    loader: Any = DataLoader(TensorDataset(torch.zeros(batches, 1)), batch_size=1)
    make_trainer(max_epochs=epochs, accumulate_grad_batches=accumulate).fit(
        module, Batches(batches) if unsized else loader
    )
    return module


class Batches:
    """A loader that does not say how many there are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(1, 1)] * self.count)


@pytest.mark.parametrize("unsized", [False, True])
@pytest.mark.parametrize("undersized", [False, True])
def test_t12_an_undersized_window_keeps_the_full_divisor_only_on_request(
    use: Any, make_trainer: Any, undersized: bool, unsized: bool
) -> None:
    use(undersized_windows=undersized)
    module = fitted(make_trainer, batches=4, accumulate=3, unsized=unsized)
    assert module.grads == pytest.approx([1.0, 1 / 3 if undersized else 1.0])


@pytest.mark.parametrize(("by_batch", "steps"), [(False, 3), (True, 2)])
def test_t14_a_scheduler_counts_batches_only_on_request(
    use: Any, make_trainer: Any, by_batch: bool, steps: int
) -> None:
    use(batch_counted_schedulers=by_batch)
    # Six optimizer steps, after the batches 3, 6 and 9 of each epoch: every second one, or those whose batch is even.
    module = fitted(make_trainer, batches=9, accumulate=3, frequency=2, epochs=2)
    assert module.trainer.lr_scheduler_configs[0].scheduler.last_epoch == steps


class Sampling(OneWeight):
    """Draws a random number whenever it is run."""

    example_input_array = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(1)


@pytest.mark.parametrize("draws", [False, True])
def test_t18_a_summary_draws_from_the_runs_generators_only_on_request(
    use: Any, make_trainer: Any, loader: Any, draws: bool
) -> None:
    use(summary_draws=draws)
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(2, generator=generator)
    seed_everything(3)
    trainer = make_trainer(enable_model_summary=True, limit_train_batches=0)
    trainer.fit(Sampling(), loader)
    assert torch.rand(1) == expected[1 if draws else 0]


class Opaque:
    """Something that is no plain data."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None  # type: ignore[assignment]


class WithHyperparameters(OneWeight):
    def __init__(self, thing: Any = None, loss: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:.*hyperparameter.*:UserWarning")
@pytest.mark.parametrize("pickles", [False, True])
def test_objects_are_pickled_in_checkpoints_only_on_request(
    use: Any, make_trainer: Any, tmp_path: Any, pickles: bool
) -> None:
    use(pickle=pickles)
    trainer: Trainer = make_trainer(max_epochs=1)
    module = WithHyperparameters(Opaque(), nn.MSELoss())
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(2, 1))))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = WithHyperparameters.load_from_checkpoint(tmp_path / "x.ckpt")
    assert (loaded.hparams["thing"] == Opaque()) is pickles
    assert isinstance(loaded.hparams.get("loss"), nn.MSELoss) is pickles
    make_trainer(max_epochs=2).fit(module, DataLoader(TensorDataset(torch.zeros(2, 1))), ckpt_path=tmp_path / "x.ckpt")


def test_plain_data_only_means_that_also_where_pickles_are_read(use: Any, tmp_path: Any) -> None:
    from drivetrain.checkpoints.file import TorchCheckpointIO

    use(pickle=True)
    torch.save({"thing": Opaque()}, tmp_path / "x.ckpt")
    store = TorchCheckpointIO()
    assert store.load_checkpoint(tmp_path / "x.ckpt") == {"thing": Opaque()}
    with pytest.raises(CheckpointError, match="plain data"):
        store.load_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    use()
    with pytest.raises(CheckpointError, match="plain data"):
        store.load_checkpoint(tmp_path / "x.ckpt")
