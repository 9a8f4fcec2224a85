"""One model on one device: the order of a life, and a way back to the host from any point of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.accelerators import Accelerator, CPUAccelerator
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.engine.engine import Engine
from drivetrain.precision import DoublePrecision, Precision
from drivetrain.strategies import SingleDeviceStrategy

CPU = torch.device("cpu")
ELSEWHERE = torch.device("cpu", 0)  # the same memory, but not equal to the host: what is moved there really moves


class RecordingAccelerator(Accelerator):
    def __init__(self, calls: list[str], device: torch.device = ELSEWHERE) -> None:
        self.calls, self.device = calls, device

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    def get_parallel_devices(self, devices: Any) -> Sequence[torch.device]:  # type: ignore[override]
        return [self.device for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {}

    def setup_device(self, device: torch.device) -> None:
        self.calls.append(f"setup_device {device}")

    def setup(self, trainer: Any) -> None:
        self.calls.append(f"setup {trainer}")

    def teardown(self) -> None:
        self.calls.append("teardown")


class RecordingPrecision(Precision):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.calls.append("convert")
        return module


class RecordingModule(nn.Linear):
    def __init__(self, calls: list[str]) -> None:
        super().__init__(2, 1)
        self.calls = calls

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"module to {args[0]}")
        return super().to(*args, **kwargs)


class RecordingTensor(torch.Tensor):
    """A tensor in an optimizer's state that tells where it is sent."""

    calls: list[str]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"state to {args[0]}")
        return torch.Tensor.to(self, *args, **kwargs)


def optimizer_with_state(module: nn.Module, calls: list[str]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        buffer = torch.zeros_like(parameter).as_subclass(RecordingTensor)
        buffer.calls = calls
        optimizer.state[parameter] = {"momentum_buffer": buffer, "step": 3}
    return optimizer


def test_s0_7_the_order_of_a_life() -> None:
    calls: list[str] = []
    strategy = SingleDeviceStrategy(accelerator=RecordingAccelerator(calls), precision_plugin=RecordingPrecision(calls))
    module = RecordingModule(calls)
    strategy.connect(module)
    assert strategy.lightning_module is strategy.model is module
    strategy.setup_environment()
    strategy.setup("the trainer")
    strategy.optimizers = [optimizer_with_state(module, calls)]
    strategy.teardown()
    assert calls == [
        "setup_device cpu:0", "setup the trainer", "convert", "module to cpu:0",
        "state to cpu", "state to cpu", "module to cpu", "teardown",
    ]  # fmt: skip


def test_s0_7_in_a_real_fit(make_trainer: Any, regression: Any, loader: Any) -> None:
    calls: list[str] = []
    accelerator = RecordingAccelerator(calls, CPU)
    trainer = make_trainer(accelerator=accelerator)
    trainer.fit(regression(), loader)
    assert [call.split()[0] for call in calls] == ["setup_device", "setup", "teardown"]
    assert trainer.accelerator is trainer.strategy.accelerator is accelerator


def test_t54_state_of_the_optimizer_goes_to_the_host_too() -> None:
    calls: list[str] = []
    strategy = SingleDeviceStrategy(accelerator=RecordingAccelerator([]))
    module = nn.Linear(2, 1)
    strategy.connect(module)
    strategy.setup(None)
    optimizer = optimizer_with_state(module, calls)
    strategy.optimizers = [optimizer]
    strategy.teardown()
    assert calls == ["state to cpu"] * 2
    assert all(state["step"] == 3 for state in optimizer.state.values())  # what is no tensor stays


def test_on_the_host_nothing_is_moved_at_teardown() -> None:
    calls: list[str] = []
    strategy = SingleDeviceStrategy(accelerator=RecordingAccelerator(calls, CPU))
    module = RecordingModule(calls)
    strategy.connect(module)
    strategy.optimizers = [optimizer_with_state(module, calls)]
    strategy.teardown()
    assert calls == ["teardown"]


@pytest.mark.parametrize("built", ["nothing", "connected", "set up", "with optimizers"])
def test_t58_a_half_built_run_can_be_torn_down(built: str) -> None:
    calls: list[str] = []
    strategy = SingleDeviceStrategy(accelerator=RecordingAccelerator(calls))
    module = nn.Linear(2, 1)
    if built != "nothing":
        strategy.connect(module)
    if built in ("set up", "with optimizers"):
        strategy.setup_environment()
        strategy.setup(None)
    if built == "with optimizers":
        strategy.optimizers = [torch.optim.Adam(module.parameters())]  # without any state yet
    strategy.teardown()
    strategy.teardown()  # an exception in the first one may bring a second
    assert calls[-2:] == ["teardown", "teardown"]


def test_the_root_device_is_the_accelerators_first_unless_given() -> None:
    assert SingleDeviceStrategy(accelerator=CPUAccelerator()).root_device == CPU
    assert SingleDeviceStrategy(accelerator=RecordingAccelerator([])).root_device == ELSEWHERE
    for device in ("meta", torch.device("meta")):
        assert SingleDeviceStrategy(device, accelerator=CPUAccelerator()).root_device == torch.device("meta")


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_strategy_that_fabric_has_chosen_names_its_precision(strategy: str) -> None:
    fabric = Engine(strategy=strategy, precision="64-true", accelerator="cpu", devices=1)
    assert isinstance(fabric.strategy.precision, DoublePrecision)
    assert fabric.strategy.precision is fabric.strategy.precision_plugin


def test_new_parameters_are_made_on_the_root_device() -> None:
    strategy = SingleDeviceStrategy("meta")
    with strategy.tensor_init_context():
        assert nn.Linear(1, 1).weight.device == torch.device("meta")
    assert nn.Linear(1, 1).weight.device == CPU


def test_of_one_process_every_collective_is_the_identity() -> None:
    strategy, tensor = SingleDeviceStrategy(accelerator=CPUAccelerator()), torch.ones(2)
    assert (strategy.world_size, strategy.global_rank, strategy.local_rank, strategy.node_rank) == (1, 0, 0, 0)
    assert strategy.is_global_zero
    assert not strategy.facts.is_distributed
    assert strategy.reduce(tensor, reduce_op="sum") is tensor
    assert strategy.all_gather(tensor) is tensor
    assert strategy.broadcast(tensor) is tensor
    strategy.barrier("name")


def test_another_rank_writes_and_deletes_nothing(tmp_path: Any) -> None:
    strategy = SingleDeviceStrategy(accelerator=CPUAccelerator())
    path = tmp_path / "run.ckpt"
    strategy.global_rank = 1
    strategy.save_checkpoint({"a": 1}, path)
    assert not path.exists()
    strategy.global_rank = 0
    strategy.save_checkpoint({"a": 1}, path)
    assert strategy.load_checkpoint(path) == {"a": 1}
    strategy.global_rank = 1
    strategy.remove_checkpoint(path)
    assert path.exists()
    strategy.global_rank = 0
    strategy.remove_checkpoint(path)
    assert not path.exists()


def test_weights_go_in_and_out_under_the_modules_own_names() -> None:
    strategy, module = SingleDeviceStrategy(accelerator=CPUAccelerator()), nn.Linear(2, 1)
    strategy.connect(module)
    state = strategy.lightning_module_state_dict()
    assert sorted(state) == ["bias", "weight"]
    other = {name: value + 1 for name, value in state.items()}
    strategy.load_model_state_dict({"state_dict": other})
    assert torch.equal(module.weight, other["weight"])
    with pytest.raises(RuntimeError, match="Missing key"):
        strategy.load_model_state_dict({"state_dict": {}})
    strategy.load_model_state_dict({"state_dict": {}}, strict=False)


def test_what_the_engine_fills_in() -> None:
    engine = Engine(accelerator="cpu", strategy=SingleDeviceStrategy())
    assert isinstance(engine.strategy.accelerator, CPUAccelerator)
    assert isinstance(engine.strategy.checkpoint_io, TorchCheckpointIO)
    assert engine.strategy.root_device == CPU
