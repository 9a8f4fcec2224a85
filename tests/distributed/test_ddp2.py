"""``ddp2``: each process stands for a machine, splits its batches over its devices, and shares gradients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.strategies import DDP2Strategy

MACHINES, DEVICES, BATCH = 2, 2, 4  # samples of a machine


def data(samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 4, generator=generator).double())


def contrast(embedded: Tensor) -> Tensor:
    """A loss in which every sample depends on all others."""
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


class Coupled(LightningModule):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.net[0].requires_grad_(not frozen)
        self.parts: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        return {"embedded": self.net(batch[0]), "n": len(batch[0])}

    def training_step_end(self, outputs: Any) -> Tensor:
        self.parts.append(outputs["n"].tolist())
        return contrast(outputs["embedded"])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def validation_step_end(self, outputs: Tensor) -> None:
        self.log("val", contrast(outputs), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def as_machine() -> None:
    """Make this process of the pool the only one of a machine of its own."""
    os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] = os.environ["RANK"], "0"


def trainer(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "strategy": "ddp2", "accelerator": "cpu", "devices": DEVICES, "num_nodes": MACHINES, "precision": "64-true",
        "max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "use_distributed_sampler": True,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def fit(frozen: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    as_machine()
    run, module = trainer(**arguments), Coupled(frozen)
    loader = DataLoader(data(), batch_size=BATCH)
    run.fit(module, loader, loader)
    metrics = dict(run.callback_metrics)
    strategy: Any = run.strategy
    ranks = (strategy.world_size, strategy.global_rank, strategy.local_rank, strategy.node_rank)
    predictions: Any = run.predict(module, loader)
    return {
        "weights": dict(module.state_dict()), "parts": module.parts, "ranks": ranks,
        "sampler": strategy.distributed_sampler_kwargs, "metrics": metrics,
        "predictions": predictions, "devices": len(strategy.parallel_devices),
    }  # fmt: skip


def by_hand(accumulate: int = 1, frozen: bool = False) -> dict[str, Any]:
    """Train with one process: a machine's loss couples its own batch, and gradients are means over machines."""
    module = Coupled(frozen)
    optimizer = module.configure_optimizers()
    (x,) = data().tensors
    batches = x.split(BATCH * MACHINES)
    for epoch in range(2):
        module.net[0].requires_grad_(not frozen or epoch == 1)
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            optimizer.zero_grad()
            for batch in window:
                machines = batch.split(BATCH)
                (sum(contrast(module.net(each)) for each in machines) / len(machines) / len(window)).backward()  # type: ignore[union-attr]
            optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize(
    ("accumulate", "frozen"), [(1, False), (2, False), (1, True)], ids=["plain", "accumulated", "thawed"]
)
def test_a_loss_that_couples_samples_equals_one_process_with_the_machines_batches(
    pool: Any, accumulate: int, frozen: bool
) -> None:
    found = pool.run(fit, frozen, {"accumulate_grad_batches": accumulate}, world_size=MACHINES, group=False)
    expected = by_hand(accumulate, frozen)
    for rank, each in enumerate(found):
        torch.testing.assert_close(each["weights"], expected, rtol=1e-9, atol=1e-9)
        assert each["parts"][0] == [2, 2]
        assert each["ranks"] == (MACHINES, rank, 0, rank)
        assert each["sampler"] == {"num_replicas": MACHINES, "rank": rank}
        assert each["devices"] == DEVICES
        assert each["metrics"]["samples"] == 24
    module = Coupled()
    module.load_state_dict(expected)
    val = torch.stack([contrast(module.net(batch)).detach() for batch in data().tensors[0].split(BATCH)]).mean()
    torch.testing.assert_close(found[0]["metrics"]["val"], val, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(torch.cat(found[0]["predictions"]), module.net(data().tensors[0]).detach())


def refused() -> list[str]:
    as_machine()

    class ByHand(Coupled):
        automatic_optimization = False

    messages = []
    for module, arguments in ((ByHand(), {}), (Coupled(), {"sync_batchnorm": True})):
        with pytest.raises(ConfigurationError) as error:
            trainer(**arguments).fit(module, DataLoader(data(), batch_size=BATCH), DataLoader(data(), batch_size=BATCH))
        messages.append(f"{type(error.value).__name__}: {error.value}")
    return messages


def test_what_it_refuses(pool: Any) -> None:
    for by_hand, batch_norm in pool.run(refused, world_size=MACHINES, group=False):
        assert by_hand.startswith(NotSupportedError.__name__)
        assert "ByHand.automatic_optimization is False, and DDP2Strategy runs training_step on 2 devices" in by_hand
        assert "sync_batchnorm=True" in batch_norm


def test_with_one_machine_it_is_dp() -> None:
    loader = DataLoader(data(), batch_size=BATCH)
    weights = []
    for strategy in ("dp", DDP2Strategy()):
        run = trainer(strategy=strategy, num_nodes=1, use_distributed_sampler=False)
        run.fit(module := Coupled(), loader, loader)
        weights.append(dict(module.state_dict()))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


def resumes(folder: Path) -> bool:
    as_machine()
    loader, file = DataLoader(data(), batch_size=BATCH), folder / "one.ckpt"
    whole, first = trainer(), trainer(max_epochs=1)
    whole.fit(uninterrupted := Coupled(), loader, loader)
    first.fit(Coupled(), loader, loader)
    first.save_checkpoint(file)
    first.strategy.barrier()
    trainer().fit(resumed := Coupled(), loader, loader, ckpt_path=file)
    torch.testing.assert_close(resumed.state_dict(), uninterrupted.state_dict(), rtol=0, atol=0)
    return True


def test_it_resumes(pool: Any, tmp_path: Path) -> None:
    assert all(pool.run(resumes, tmp_path, world_size=MACHINES, group=False))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def embed(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def on_engine() -> dict[str, Tensor]:
    as_machine()
    engine = Engine(strategy="ddp2", accelerator="cpu", devices=DEVICES, num_nodes=MACHINES, precision="64-true")
    engine.launch()
    module = Plain()
    model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
    model.mark_forward_method("embed")
    for index, (x,) in enumerate(engine.setup_dataloaders(DataLoader(data(), batch_size=BATCH))):
        optimizer.zero_grad()
        engine.backward(contrast(model(x) if index % 2 else model.embed(x)))
        optimizer.step()
    return dict(module.state_dict())


def test_an_engine_trains_with_it(pool: Any) -> None:
    module = Plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for batch in data().tensors[0].split(BATCH * MACHINES):
        optimizer.zero_grad()
        (sum(contrast(module(each)) for each in batch.split(BATCH)) / MACHINES).backward()  # type: ignore[union-attr]
        optimizer.step()
    for weights in pool.run(on_engine, world_size=MACHINES, group=False):
        torch.testing.assert_close(weights, dict(module.state_dict()), rtol=1e-6, atol=1e-6)  # outputs are 32-bit
