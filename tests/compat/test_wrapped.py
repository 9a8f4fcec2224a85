from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Engine
from drivetrain.compat.wrapped import is_wrapped


def test_what_set_up_returns_is_told_from_what_it_got() -> None:
    engine = Engine(accelerator="cpu")
    net = nn.Linear(1, 1)
    optimizer, loader = torch.optim.SGD(net.parameters(), lr=0.1), DataLoader([1, 2])  # type: ignore[arg-type]
    wrapped = [*engine.setup(net, optimizer), engine.setup_dataloaders(loader)]
    assert all(map(is_wrapped, wrapped))
    assert not any(map(is_wrapped, [net, optimizer, loader]))
