"""What the tests of both earlier generations share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.legacy import v1_1, v1_3


@pytest.fixture(params=[v1_1, v1_3], ids=["1.1", "1.3"])
def pl(request: pytest.FixtureRequest) -> Any:
    """The generation."""
    return request.param


def loader(batches: int = 3) -> DataLoader[Any]:
    return DataLoader(torch.ones(2 * batches, 1), batch_size=2)  # type: ignore[arg-type]


def trainer_of(pl: Any, **flags: Any) -> Any:
    return pl.Trainer(**{
        "max_epochs": 2, "logger": False, "checkpoint_callback": False, "progress_bar_refresh_rate": 0,
        "weights_summary": None, "num_sanity_val_steps": 0, **flags,
    })  # fmt: skip


def model_of(pl: Any, **members: Any) -> Any:
    """A module whose weight loses 1 for each batch; ``members`` are its other methods."""

    def __init__(self: Any) -> None:
        super(cls, self).__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    own: dict[str, Any] = {
        "__init__": __init__,
        "training_step": lambda self, batch, batch_idx: self.weight.sum(),
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=1.0),
    }
    cls = type("Model", (pl.LightningModule,), {**own, **members})
    return cls()
