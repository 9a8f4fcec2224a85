"""``lightning.fabric.strategies`` for XLA devices, on the real torch_xla with one replica."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import compat
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.precision import XLAPrecision


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(self.first(x).tanh())
        return result


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def of_fabric(name: str) -> Any:
    return getattr(importlib.import_module("lightning.fabric.strategies"), name)


STRATEGIES: dict[str, Any] = {
    "single": lambda: of_fabric("SingleDeviceXLAStrategy")(),
    "replicas": lambda: of_fabric("XLAStrategy")(sync_module_states=True),
    "one unit": lambda: of_fabric("XLAFSDPStrategy")(),
    "blocks": lambda: of_fabric("XLAFSDPStrategy")(
        auto_wrap_policy={Block}, activation_checkpointing_policy={Block}, sequential_save=True
    ),
}


def engine_of(strategy: Any, accelerator: str = "xla") -> Any:
    import lightning as L

    fabric = L.Fabric(accelerator=accelerator, devices=1, strategy=strategy)
    fabric.launch()
    return fabric


def program(strategy: Any, folder: Path | None = None, accelerator: str = "xla") -> Any:
    """Losses of a loop that accumulates gradients and clips; with a folder, also after its checkpoint was loaded."""
    fabric = engine_of(strategy, accelerator)
    with fabric.init_module(empty_init=False):
        built = net()
    built.load_state_dict(net().state_dict())  # a device draws other numbers than the host
    model = fabric.setup_module(built)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.02))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2))

    def epoch() -> list[float]:
        losses = []
        for index, (inputs, targets) in enumerate(loader):
            assert inputs.device.type == accelerator
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = F.mse_loss(model(inputs), targets)
                fabric.backward(loss / 2)
            losses.append(loss.detach())
            if index % 2:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0).detach())
                optimizer.step()
                optimizer.zero_grad()
        return [fabric.all_reduce(loss).item() for loss in losses]

    norms: list[Any] = []
    found = epoch()
    if folder is not None:
        state = {"model": model, "optimizer": optimizer, "epoch": 3}
        fabric.save(folder / "state", state)
        expected = epoch()
        state["epoch"] = 0
        assert fabric.load(folder / "state", state) == {}
        assert state["epoch"] == 3
        assert epoch() == pytest.approx(expected, rel=1e-5)
    facts = [each.item() for each in norms[:4]]
    fabric.teardown()
    return found + facts


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_loop_gives_the_numbers_of_the_host(kind: str, tmp_path: Path) -> None:
    expected = program("auto", accelerator="cpu")
    assert program(STRATEGIES[kind](), tmp_path) == pytest.approx(expected, rel=1e-3)
    assert len(set(expected)) > 8  # the control: it has learnt something


def test_a_checkpoint_with_all_weights_is_a_file_for_a_module_without_shards(tmp_path: Path) -> None:
    fabric = engine_of(of_fabric("XLAFSDPStrategy")(auto_wrap_policy={Block}, state_dict_type="full"))
    model = fabric.setup_module(net())
    fabric.save(tmp_path / "all.ckpt", {"model": model})
    saved = torch.load(tmp_path / "all.ckpt")["model"]
    torch.testing.assert_close(saved, dict(net().state_dict()))
    other = net()
    nn.init.zeros_(other[2].weight)
    assert fabric.load(tmp_path / "all.ckpt", {"model": other}) == {}
    torch.testing.assert_close(dict(other.state_dict()), saved)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").touch()
    with pytest.raises(FileExistsError):
        fabric.save(tmp_path / "folder", {"model": model})
    fabric.teardown()


def test_shards_of_another_job_are_refused(tmp_path: Path) -> None:
    fabric = engine_of(of_fabric("XLAFSDPStrategy")())
    model = fabric.setup_module(net())
    fabric.save(tmp_path / "state", {"model": model})
    [file] = (tmp_path / "state").iterdir()
    assert file.name == "checkpoint_rank-00000000-of-00000001.pth"
    assert set(torch.load(file)) == {"model", "shard_metadata"}
    file.rename(file.with_name("checkpoint_rank-00000000-of-00000002.pth"))
    with pytest.raises(CheckpointError, match="another number of replicas"):
        fabric.load(tmp_path / "state", {"model": model})
    with pytest.raises(ValueError, match="holds one module"):
        fabric.save(tmp_path / "none", {"epoch": 1})
    fabric.teardown()


def test_optimizers_come_after_the_module() -> None:
    fabric = engine_of(of_fabric("XLAFSDPStrategy")())
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(NotImplementedError, match="build the optimizer on model.parameters"):
        fabric.setup(module, optimizer)
    with pytest.raises(ValueError, match="no parameter that XLAFSDPStrategy has sharded"):
        fabric.setup_optimizers(optimizer)
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match="by value"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    fabric.teardown()


def test_shards_keep_32_bits_and_compute_in_the_precision() -> None:
    fabric = engine_of(of_fabric("XLAFSDPStrategy")(precision=XLAPrecision("bf16-true")))
    model = fabric.setup_module(net())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model._forward_module.compute_dtype is torch.bfloat16
    fabric.teardown()


def test_all_reduce_adds_up_unless_told_otherwise() -> None:
    for name in ("XLAStrategy", "XLAFSDPStrategy"):
        fabric = engine_of(of_fabric(name)())
        assert fabric.strategy.all_reduce(3).item() == 3
        assert fabric.strategy.all_reduce(torch.ones(2, device=fabric.device), reduce_op="mean").tolist() == [1, 1]
        fabric.teardown()


def test_names_instances_and_arguments() -> None:
    plain = importlib.import_module("drivetrain.strategies")
    for name, module in (("SingleDeviceXLAStrategy", "single_xla"), ("XLAStrategy", "xla")):
        cls = of_fabric(name)
        assert getattr(importlib.import_module(f"lightning_fabric.strategies.{module}"), name) is cls
        assert isinstance(getattr(plain, name)(), cls)
    sharded = of_fabric("XLAFSDPStrategy")
    assert not isinstance(plain.XLAStrategy(), sharded)
    assert isinstance(sharded(), (sharded, plain.XLAStrategy))
    with pytest.raises(ConfigurationError, match="state_dict_type='whole'"):
        sharded(state_dict_type="whole")
    with pytest.raises(ConfigurationError, match="Pass one of them"):
        sharded(activation_checkpointing_policy={Block}, auto_wrapper_callable=Block)
