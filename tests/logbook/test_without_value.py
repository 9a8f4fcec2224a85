"""A metric object that computes None: it has no value, and is left out until it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drivetrain import LightningModule, Trainer


class Counts(torch.nn.Module):
    """Has a value from the given number of updates on."""

    def __init__(self, needed: int) -> None:
        super().__init__()
        self.needed, self.seen = needed, 0

    def update(self) -> None:
        self.seen += 1

    def compute(self) -> Any:
        return torch.tensor(float(self.seen)) if self.seen >= self.needed else None

    def reset(self) -> None:
        self.seen = 0


class Net(LightningModule):
    def __init__(self, needed: int) -> None:
        super().__init__()
        self.layer, self.counts = torch.nn.Linear(2, 1), Counts(needed)
        self.results: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(self.trainer.current_epoch + 1):
            self.counts.update()
        self.log_dict({"count": self.counts, "other": 1.0}, on_epoch=True, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.results.append(sorted((name, float(value)) for name, value in self.trainer.callback_metrics.items()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_it_is_left_out_of_the_epochs_in_which_it_has_none(tmp_path: Path) -> None:
    net, batches = Net(4), [torch.ones(1, 2)] * 2
    Trainer(
        accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, num_sanity_val_steps=0, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(net, batches, batches)  # fmt: skip
    assert net.results == [[("other", 1.0)], [("count", 4.0), ("other", 1.0)]]
