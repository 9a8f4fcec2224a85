"""What every strategy for XLA devices must train to: rows that tests of one process and of SPMD share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.testing._regression import BATCHES, GLOBAL_BATCH, data

TOLERANCES = {"32-true": 1e-5, "bf16-mixed": 5e-2, "16-mixed": 1e-2, "bf16-true": 1e-1, "16-true": 2e-2}


class Model(LightningModule):
    """SGD with momentum, so that a precision's rounding is not blown up; made from the seed."""

    def __init__(self) -> None:
        super().__init__()
        seed_everything(11)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader() -> Any:
    return DataLoader(data(BATCHES), batch_size=GLOBAL_BATCH)


def trainer(strategy: Any, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "xla", "max_epochs": 2, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False,
    }  # fmt: skip
    return Trainer(**{**quiet, "strategy": strategy, **arguments})


def trained(strategy: Any, ckpt_path: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """The weights after a fit, on the host."""
    model = Model()
    trainer(strategy, **arguments).fit(model, loader(), ckpt_path=ckpt_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return {name: weight.detach() for name, weight in model.named_parameters()}


def reference() -> dict[str, Any]:
    """The weights of a loop of torch's alone, on the host and in 64 bits."""
    model = Model().double()
    optimizer: Any = model.configure_optimizers()
    for _ in range(2):
        for x, y, _tokens in loader():
            optimizer.zero_grad()
            nn.functional.mse_loss(model.net(x.double()), y.double()).backward()
            optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def near(found: dict[str, Any], tolerance: float) -> None:
    for name, weight in reference().items():
        torch.testing.assert_close(found[name].double(), weight, rtol=tolerance, atol=tolerance)


def written_elsewhere(folder: Path, precision: str = "32-true") -> Path:
    """A single file with the first epoch, by one process on the host."""
    host = trainer("single_device", accelerator="cpu", devices=1, max_epochs=1, precision=precision)
    host.fit(Model(), loader())
    host.save_checkpoint(folder / "elsewhere.ckpt")
    return folder / "elsewhere.ckpt"
