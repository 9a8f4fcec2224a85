"""The contract: what an author must write, what comes by itself, and how a class gets its names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.accelerators import (
    Accelerator,
    AcceleratorRegistry,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    TorchDeviceAccelerator,
    XLAAccelerator,
)
from drivetrain.accelerators.graphs import _waits_seen
from drivetrain.errors import ConfigurationError, UnknownNameError
from drivetrain.testing import fake_devices


@pytest.fixture
def xpu(xpulib: Any) -> type[Accelerator]:
    """Spec E0-1: exactly the five methods that the document prints, on devices that exist."""

    class XPUAccelerator(Accelerator):
        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
            return [xpulib.device(i) for i in devices]

        @staticmethod
        def auto_device_count() -> int:
            return xpulib.available_devices()

        @staticmethod
        def is_available() -> bool:
            return xpulib.is_available()

        def get_device_stats(self, device: torch.device) -> dict[str, float]:
            return {}

    return XPUAccelerator


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """torch, on a machine whose accelerator is called xpu: what it was asked for, in order."""
    asked: list[tuple[str, Any]] = []

    def answers(name: str, value: Any) -> Any:
        def fake(device: Any) -> Any:
            asked.append((name, device))
            return value

        return fake

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    for name, value in {
        "set_device_index": None, "synchronize": None, "memory_allocated": 3, "max_memory_allocated": 7,
        "reset_peak_memory_stats": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.accelerator, name, answers(name, value))
    return asked


# ---- five methods ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{"devices": 1}, {"devices": "1"}, {"devices": [0]}, {"strategy": "single_device"}]
)
def test_e0_1_c1_c2_five_methods_train(
    xpu: type[Accelerator], arguments: Any, make_trainer: Any, regression: Any, loader: Any
) -> None:
    torch.manual_seed(0)
    expected = regression()
    torch.manual_seed(0)
    model = regression()
    make_trainer().fit(expected, loader)
    trainer = make_trainer(accelerator=xpu(), **arguments)
    trainer.fit(model, loader)
    assert trainer.global_step == 4
    assert type(trainer.accelerator) is xpu
    assert trainer.strategy.root_device == torch.device("cpu", 0)
    for name, value in expected.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_an_accelerator_is_asked_for_the_devices_of_the_plan_alone(make_trainer: Any, xpu: Any) -> None:
    class Second(xpu):  # type: ignore[misc]
        @staticmethod
        def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
            if list(devices) != [1]:
                raise RuntimeError(f"asked for {devices}, and device 0 belongs to another program")
            return [torch.device("cpu")]

    trainer = make_trainer(accelerator=Second(), devices=[1])
    assert trainer.accelerator.autocast_device_type == trainer.strategy.root_device.type == "cpu"
    assert trainer.accelerator.process_group_backend == "gloo"


E0_1 = """
import sys, torch, xpulib
from drivetrain import LightningModule, Trainer
from drivetrain.accelerators import Accelerator

class XPUAccelerator(Accelerator):
    @staticmethod
    def parse_devices(devices): return devices
    @staticmethod
    def get_parallel_devices(devices): return [xpulib.device(i) for i in devices]
    @staticmethod
    def auto_device_count(): return xpulib.available_devices()
    @staticmethod
    def is_available(): return xpulib.is_available()
    def get_device_stats(self, device): return {}

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx): return self.layer(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(accelerator=XPUAccelerator(), devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
sys.stdout.write(f"rank {trainer.global_rank} on {trainer.strategy.root_device}: {trainer.global_step} steps\\n")
"""


def test_e0_1_two_devices(programs: Any, tmp_path: Path) -> None:
    """As the document prints it, in a file of its own: the program starts itself once per device."""
    (tmp_path / "train.py").write_text(E0_1)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = programs.run("train.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.9 prints some
    assert sorted(lines) == ["rank 0 on cpu:0: 2 steps", "rank 1 on cpu:1: 2 steps"]


def test_c2_the_second_device_is_reached_by_its_index(
    xpu: type[Accelerator], make_trainer: Any, regression: Any, loader: Any
) -> None:
    trainer = make_trainer(accelerator=xpu(), devices=[1])
    trainer.fit(regression(), loader)
    assert trainer.strategy.parallel_devices == (torch.device("cpu", 1),)
    assert trainer.device_ids == [1]


def test_c1_the_contract_itself_has_no_instances() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Accelerator()  # type: ignore[abstract]
    assert Accelerator.__abstractmethods__ == {
        "parse_devices", "get_parallel_devices", "auto_device_count", "is_available", "get_device_stats",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("class_name", "name"),
    [("XPUAccelerator", "xpu"), ("Quantum", "quantum"), ("Accelerator", "accelerator"), ("AcceleratorOfMine", None)],
)
def test_c1_the_name_comes_from_the_class(xpu: type[Accelerator], class_name: str, name: str | None) -> None:
    assert type(class_name, (xpu,), {})().name == (name or "acceleratorofmine")


# ---- what comes by itself --------------------------------------------------------------------------------------------


def test_c1_s0_7_defaults_are_torchs_where_it_has_the_device(
    xpu: type[Accelerator], torchs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, device = xpu(), torch.device("xpu", 1)
    module = SimpleNamespace(get_device_properties=lambda of: SimpleNamespace(total_memory=of.index + 10))
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    accelerator.setup_device(device)
    accelerator.synchronize(device)
    assert accelerator.memory_allocated(device) == 3
    assert accelerator.max_memory_allocated(device) == 7
    accelerator.reset_peak_memory(device)
    assert accelerator.total_memory(device) == 11
    assert torchs == [
        ("set_device_index", device), ("synchronize", device), ("memory_allocated", device),
        ("max_memory_allocated", device), ("reset_peak_memory_stats", device),
    ]  # fmt: skip
    module = SimpleNamespace()
    assert accelerator.total_memory(device) is None  # a backend that tells nothing


def test_c1_s0_7_defaults_leave_other_devices_alone(xpu: type[Accelerator], torchs: list[Any]) -> None:
    accelerator, device = xpu(), torch.device("cpu", 1)
    accelerator.setup_device(device)
    accelerator.synchronize(device)
    accelerator.reset_peak_memory(device)
    accelerator.setup(None)
    accelerator.teardown()
    assert accelerator.memory_allocated(device) is None
    assert accelerator.max_memory_allocated(device) is None
    assert accelerator.total_memory(device) is None
    assert torchs == []


def test_c4_autocast_and_the_process_group_follow_the_devices(
    xpu: type[Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (xpu().autocast_device_type, xpu().process_group_backend) == ("cpu", "gloo")
    monkeypatch.setattr(xpu, "get_parallel_devices", staticmethod(lambda devices: [torch.device("cuda", devices[0])]))
    assert (xpu().autocast_device_type, xpu().process_group_backend) == ("cuda", "nccl")


def test_c4_autocast_runs_on_a_custom_device(
    xpu: type[Accelerator], make_trainer: Any, regression: Any, loader: Any
) -> None:
    dtypes: list[torch.dtype] = []

    class Watched(regression):
        def loss(self, batch: Any) -> torch.Tensor:
            dtypes.append(self.net(batch[0]).dtype)
            return super().loss(batch)

    make_trainer(accelerator=xpu(), devices=1, precision="bf16-mixed").fit(Watched(), loader)
    assert set(dtypes) == {torch.bfloat16}


class Unlimited(Accelerator):
    """Devices without numbers, as the host's processes are."""

    parse_devices = staticmethod(lambda devices: devices)
    get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu") for _ in devices])
    auto_device_count = staticmethod(lambda: 2)
    is_available = staticmethod(lambda: True)

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {}


class Limited(Unlimited):
    device_count_is_limit = True


def test_an_author_need_not_declare_anything(xpu: type[Accelerator]) -> None:
    accelerator = xpu()
    assert accelerator.auto_priority is None
    assert accelerator.supports_float64
    assert accelerator.supports_several_devices
    assert (accelerator.supports_non_blocking, accelerator.supports_pinned_memory) == (True, False)
    assert not accelerator.device_count_is_limit
    assert accelerator.why_unavailable() == "its is_available() returned False"


# ---- life ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(xpu: type[Accelerator]) -> tuple[Accelerator, list[str]]:
    calls: list[str] = []

    class Recording(xpu):  # type: ignore[misc, valid-type]
        def setup_device(self, device: torch.device) -> None:
            calls.append(f"setup_device {device}")

        def setup(self, trainer: Any) -> None:
            calls.append(f"setup for {trainer.strategy.model.net[0].weight.dtype}")

        def teardown(self) -> None:
            calls.append("teardown")

    return Recording(), calls


LIFE = ["setup_device cpu:1", "setup for torch.float32", "training", "teardown"]


def test_s0_1_s0_7_the_strategy_calls_it_in_order(
    recording: Any, make_trainer: Any, regression: Any, loader: Any
) -> None:
    accelerator, calls = recording

    class Watched(regression):
        def on_train_start(self) -> None:
            calls.append("training")

    trainer = make_trainer(accelerator=accelerator, devices=[1], precision="64-true")
    trainer.fit(Watched(), loader)
    assert calls == LIFE  # its set-up comes before the model is converted
    assert trainer.accelerator is trainer.strategy.accelerator is accelerator


def test_s0_7_teardown_comes_also_after_an_exception(
    recording: Any, make_trainer: Any, regression: Any, loader: Any
) -> None:
    accelerator, calls = recording

    class Fails(regression):
        def on_train_start(self) -> None:
            calls.append("training")
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(accelerator=accelerator, devices=[1]).fit(Fails(), loader)
    assert calls == LIFE


# ---- names -----------------------------------------------------------------------------------------------------------


def named(xpu: type[Accelerator], *names: str, **init_params: Any) -> type[Accelerator]:
    """A class that gives itself ``names`` by being defined."""

    class Named(xpu):  # type: ignore[misc, valid-type]
        """The first line.

        The second.
        """

        def __init__(self, **given: Any) -> None:
            self.given = given

        @classmethod
        def register_accelerators(cls, accelerator_registry: Any) -> None:
            for name in names:
                accelerator_registry.register(name, cls, **init_params)

    return Named


def test_e0_2_c3_a_class_is_registered_by_being_defined(registry: Any, xpu: type[Accelerator]) -> None:
    assert "mine" not in registry.available_accelerators()
    own = named(xpu, "mine", "also_mine")
    assert {"mine", "also_mine"} <= set(registry.available_accelerators())
    assert "mine" in registry
    assert type(registry.get("mine")) is type(registry.get("also_mine")) is own


def test_c3_a_trainer_finds_it_by_its_name(registry: Any, xpu: type[Accelerator], make_trainer: Any) -> None:
    own = named(xpu, "mine")
    for given in ("mine", own, own()):
        assert type(make_trainer(accelerator=given, devices=1).accelerator) is own


def test_c3_a_subclass_does_not_take_the_name_of_its_parent(registry: Any, xpu: type[Accelerator]) -> None:
    own = named(xpu, "mine")
    type("Further", (own,), {})
    assert registry.entry("mine").cls is own


def test_c3_without_register_accelerators_there_is_no_name(registry: Any, xpu: type[Accelerator]) -> None:
    before = registry.available_accelerators()
    type("Silent", (xpu,), {})
    assert registry.available_accelerators() == before


def test_s0_9_what_an_entry_says(registry: Any, xpu: type[Accelerator]) -> None:
    own = named(xpu, "mine", volts=3)
    assert registry["mine"] == {
        "accelerator": own, "accelerator_name": "mine", "description": "The first line.", "init_params": {"volts": 3},
    }  # fmt: skip
    assert registry.get("mine").given == {"volts": 3}
    assert registry.get("mine") is not registry.get("mine")


def test_s0_9_the_decorator(registry: Any, xpu: type[Accelerator]) -> None:
    @registry.register("mine", description="By hand", volts=3)
    class Decorated(xpu):  # type: ignore[misc, valid-type]
        def __init__(self, volts: int) -> None:
            self.volts = volts

    assert registry.get("mine").volts == 3
    assert registry["mine"]["description"] == "By hand"
    assert isinstance(registry.get("mine"), Decorated)


def test_s0_9_duplicates_raise_unless_overridden_and_names_can_be_removed(
    registry: Any, xpu: type[Accelerator]
) -> None:
    first = named(xpu, "mine")
    other = type("Other", (xpu,), {})
    with pytest.raises(ConfigurationError, match="accelerator name 'mine' already belongs to .*override=True"):
        registry.register("mine", other)
    assert registry.entry("mine").cls is first
    registry.register("mine", other, override=True)
    assert registry.entry("mine").cls is other
    registry.remove("mine")
    with pytest.raises(KeyError, match="no accelerator called 'mine'"):
        registry.get("mine")
    with pytest.raises(UnknownNameError, match="No accelerator was registered as 'mine'"):
        registry.remove("mine")


def test_s0_12_the_names_of_ours() -> None:
    classes = {name: AcceleratorRegistry.entry(name).cls for name in ("cpu", "cuda", "mps", "tpu", "xla")}
    assert classes == {
        "cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator,
        "tpu": XLAAccelerator, "xla": XLAAccelerator,
    }  # fmt: skip


def test_simulated_devices_are_not_offered_and_no_accelerator_is_offered_twice(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(XLAAccelerator, "is_available", staticmethod(lambda: True))
    with pytest.raises(ConfigurationError, match=r"Known: auto, cpu, cuda, gpu, mps, tpu, xla\.$"):
        Trainer(accelerator="faker")
    with pytest.raises(ConfigurationError, match=r"Available: cpu, tpu\. "):
        Trainer(accelerator="mps")
    with fake_devices(2):
        assert Trainer(accelerator="fake", devices=2, strategy="ddp_spawn").accelerator.name == "fake"
    assert "fake" not in registry.available()  # nor now that it was used
    registry.register("fake", CPUAccelerator, override=True)  # of the user's own
    assert "fake" in registry.available()


@pytest.mark.parametrize("devices", [3, "3"], ids=["number", "text"])
def test_more_devices_than_a_count_that_is_a_limit_are_refused(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"means 3 devices, but the accelerator 'limited' has 2 here\. Write "):
        Trainer(accelerator=Limited(), devices=devices, strategy="ddp_spawn")
    assert Trainer(accelerator=Limited(), devices=-1, strategy="ddp_spawn").num_devices == 2
    assert Trainer(accelerator=Limited(), devices=2, strategy="ddp_spawn").num_devices == 2
    assert Trainer(accelerator=Unlimited(), devices=devices, strategy="ddp_spawn").num_devices == 3


def test_processes_of_the_host_have_no_limit_and_other_devices_of_torchs_have() -> None:
    assert {cls.device_count_is_limit for cls in (TorchDeviceAccelerator, CUDAAccelerator, MPSAccelerator)} == {True}
    assert XLAAccelerator.device_count_is_limit
    assert not CPUAccelerator.device_count_is_limit


def test_s0_10_priorities_stand_in_the_order_of_auto() -> None:
    ranked = [XLAAccelerator, MPSAccelerator, CUDAAccelerator, TorchDeviceAccelerator, CPUAccelerator]
    priorities: list[Any] = [cls.auto_priority for cls in ranked]
    assert priorities == sorted(priorities, reverse=True)
    assert priorities == [400, 300, 200, 100, 0]  # documented, because a user's class stands between them


def test_waits_for_the_device_are_kept_and_other_warnings_are_shown() -> None:
    """torch warns of a wait where the backend's debug mode says so; other warnings go where they would have gone."""

    class Backend:
        mode = "default"

        def get_sync_debug_mode(self) -> str:
            return self.mode

        def set_sync_debug_mode(self, mode: str) -> None:
            self.mode = mode

    def step() -> None:
        with _waits_seen(Backend(), waits):
            warnings.warn("called a synchronizing operation", stacklevel=1)
            warnings.warn("another one", stacklevel=1)

    waits: list[str] = []
    with pytest.warns(UserWarning, match="^another one$") as shown:
        step()
    assert len(waits) == len(shown) == 1
    assert waits[0].startswith(__file__)
