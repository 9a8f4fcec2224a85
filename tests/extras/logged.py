"""What the tests of loggers share: a module that logs, and a fit that is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint


class Net(LightningModule):
    """Logs its loss, and has hyperparameters."""

    def __init__(self, width: int = 2, rates: dict[str, float] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1)


def trainer(folder: Path, logger: Any, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False,
        "log_every_n_steps": 1, "default_root_dir": folder,
    }  # fmt: skip
    return Trainer(logger=logger, **{**quiet, **arguments})


def cut_and_resumed(
    folder: Path, make: Callable[[], Any], ends: Callable[[Any], None] = lambda logger: None
) -> tuple[Any, Any]:
    """Return the loggers of a fit of two epochs, and of one that resumes after the first of them and runs to three.

    Args:
        folder: for everything.
        make: returns a new logger.
        ends: does to a logger what the end of the program does.
    """
    first, second = make(), make()
    saves = ModelCheckpoint(filename="{epoch}", save_top_k=-1)
    trainer(folder, first, max_epochs=2, callbacks=[saves]).fit(Net(rates={"lr": 0.1}), loader())
    ends(first)
    saved = Path(saves.best_model_path).parent / "epoch=0.ckpt"
    assert str(first.version) in str(saved)
    again = ModelCheckpoint(filename="{epoch}", save_top_k=-1)
    trainer(folder, second, max_epochs=3, callbacks=[again]).fit(Net(rates={"lr": 0.1}), loader(), ckpt_path=saved)
    ends(second)
    assert Path(again.best_model_path).parent == saved.parent
    return first, second
