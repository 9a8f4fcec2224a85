"""``fabric.strategies.DataParallelStrategy``: a loop of one's own on replicas in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import strategies as plain
from drivetrain.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("served")


def program(strategy: Any, devices: int, folder: Path) -> dict[str, Any]:
    import lightning as L

    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    x = torch.randn(12, 4)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3))
    norms, parts = [], []
    net.register_forward_hook(lambda module, args, output: parts.append(len(output)))
    for inputs, targets in loader:
        with fabric.no_backward_sync(model, enabled=False):
            fabric.backward(F.mse_loss(model(inputs), targets))
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0))
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    fabric.save(folder / "x.ckpt", state)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    nn.init.zeros_(net[0].weight)
    fabric.load(folder / "x.ckpt", state)
    torch.testing.assert_close(net.state_dict(), expected, rtol=0, atol=0)
    facts = (fabric.world_size, fabric.global_rank, len(loader), fabric.device, fabric.broadcast(3))
    fabric.teardown()
    return {"weights": expected, "norms": norms, "facts": facts, "parts": parts}


@pytest.mark.parametrize("devices", [1, 2])
def test_replicas_train_as_one_device(devices: int, tmp_path: Path) -> None:
    from lightning.fabric.strategies import DataParallelStrategy

    found, expected = program(DataParallelStrategy(), devices, tmp_path), program("auto", 1, tmp_path)
    for name in ("weights", "norms"):
        torch.testing.assert_close(found[name], expected[name])
    assert found["facts"] == expected["facts"]
    assert max(found["parts"]) == (3 if devices == 1 else 2)  # the control: a replica saw a part of the batch
    assert set(torch.load(tmp_path / "x.ckpt")["model"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_all_reduce_averages_what_several_devices_have_given() -> None:
    from lightning.fabric.strategies import DataParallelStrategy

    strategy = DataParallelStrategy()
    assert strategy.all_reduce({"loss": torch.tensor([1.0, 3.0]), "name": "a"}) == {"loss": 2.0, "name": "a"}
    assert strategy.all_reduce(torch.tensor([1.0, 3.0]), reduce_op="sum").tolist() == [1.0, 3.0]


def test_names_and_instances() -> None:
    from lightning.fabric.strategies import DataParallelStrategy, ParallelStrategy
    from lightning.fabric.strategies.dp import DataParallelStrategy as Same

    assert Same is DataParallelStrategy
    assert isinstance(drivetrain.Engine(accelerator="cpu", devices=2, strategy="dp").strategy, DataParallelStrategy)
    assert issubclass(DataParallelStrategy, plain.DataParallelStrategy)
    assert not issubclass(DataParallelStrategy, ParallelStrategy)  # which have a process for each device
    assert DataParallelStrategy(None, [torch.device("cpu")]).cluster_environment is None
    with pytest.raises(ConfigurationError, match=r"Subclass lightning\.pytorch\.strategies\.DataParallelStrategy\."):
        drivetrain.Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy())
