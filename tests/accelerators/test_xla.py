"""TPUs, with a made-up torch_xla."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.accelerators import AcceleratorRegistry, XLAAccelerator
from drivetrain.errors import ConfigurationError
from drivetrain.plan import resolve
from drivetrain.settings import Settings

DEVICE = torch.device("xla", 2)


class Library:
    """torch_xla: what it would answer, and what it was asked for."""

    def __init__(self) -> None:
        self.count, self.kind, self.started, self.spmd = 4, "NEURON", False, False
        self.memory: dict[str, int] | None = {"bytes_used": 2048, "peak_bytes_used": 4096, "bytes_limit": 1 << 34}
        self.calls: list[Any] = []
        names = ("", ".runtime", ".core", ".core.xla_model", "._internal", "._internal.tpu")
        root, runtime, core, xla_model, internal, tpu = (ModuleType(f"torch_xla{name}") for name in names)
        root.__spec__ = ModuleSpec("torch_xla", None)
        vars(root).update(runtime=runtime, core=core, sync=lambda wait=False: self.calls.append(("sync", wait)))
        vars(root).update(_XLAC=SimpleNamespace(_xla_runtime_is_initialized=lambda: self.started), _internal=internal)
        vars(runtime).update(
            addressable_device_count=lambda: self.count, is_spmd=lambda: self.spmd, device_type=lambda: self.kind,
            addressable_runtime_device_count=lambda: self.count * 2,
        )  # fmt: skip
        vars(internal).update(tpu=tpu)
        vars(tpu).update(num_available_devices=lambda: self.count * 4)
        vars(core).update(xla_model=xla_model)
        vars(xla_model).update(get_memory_info=self.memory_info)
        self.modules = {module.__name__: module for module in (root, runtime, core, xla_model, internal, tpu)}

    def memory_info(self, device: torch.device) -> dict[str, int]:
        self.calls.append(("memory", device))
        if self.memory is None:
            raise RuntimeError("not supported on this device")
        return self.memory


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize(
    ("devices", "parsed", "indices"),
    [
        (1, 1, [0]), ("1", 1, [0]), (4, 4, [0, 1, 2, 3]), ("4", 4, [0, 1, 2, 3]), (-1, 4, [0, 1, 2, 3]),
        ("-1", 4, [0, 1, 2, 3]), ([0], [0], [0]), ([3], [3], [3]), ((2,), [2], [2]), ("3,", [3], [3]),
    ],
)  # fmt: skip
def test_s0_12_one_all_or_a_certain_one(library: Library, devices: Any, parsed: Any, indices: list[int]) -> None:
    assert XLAAccelerator.parse_devices(devices) == parsed
    assert XLAAccelerator.get_parallel_devices(parsed) == [torch.device("xla", index) for index in indices]


@pytest.mark.parametrize(
    "devices", [2, 3, 5, 0, -2, "2", [0, 1], "0,1", [4], "4,", [-1], [], [0.0], [True], True, 1.0, -1.0, None, "all"]
)
def test_s0_12_anything_else_is_refused(library: Library, devices: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"a job uses one XLA device, .* all 4 of .* Write devices=1, .*=4 or .*=\[0\]"
    ) as caught:
        XLAAccelerator.parse_devices(devices)
    assert f"devices={devices!r}" in str(caught.value)


@pytest.mark.parametrize("name", ["tpu", "xla"])
def test_s0_4_s0_5_what_it_says_of_itself(library: Library, name: str) -> None:
    accelerator = AcceleratorRegistry.get(name)
    assert type(accelerator) is XLAAccelerator
    assert accelerator.name == "tpu"
    assert accelerator.auto_device_count() == 4
    assert accelerator.is_available()
    assert accelerator.autocast_device_type == accelerator.process_group_backend == "xla"
    accelerator.setup_device(DEVICE)
    assert library.calls == []


def test_s0_10_auto_takes_it_first(library: Library) -> None:
    plan = resolve(Settings(accelerator="auto"))
    assert type(plan.accelerator) is XLAAccelerator
    assert plan.devices == tuple(torch.device("xla", index) for index in range(4))
    library.count = 0
    assert type(resolve(Settings(accelerator="auto")).accelerator) is not XLAAccelerator


def test_devices_are_counted_without_starting_the_runtime_on_a_tpu(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.kind = "TPU"
    assert XLAAccelerator.auto_device_count() == 16
    library.started = True
    assert XLAAccelerator.auto_device_count() == 4
    library.spmd = True  # one virtual device stands for all
    assert XLAAccelerator.auto_device_count() == 8
    library.kind, library.spmd = "CPU", False
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    assert XLAAccelerator.auto_device_count() == 1
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    assert XLAAccelerator.auto_device_count() == 3


def test_auto_does_not_take_torch_xlas_devices_on_the_processor(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert XLAAccelerator.joins_auto()
    library.kind = "CPU"
    assert type(resolve(Settings(accelerator="auto")).accelerator) is not XLAAccelerator
    assert type(resolve(Settings(accelerator="xla")).accelerator) is XLAAccelerator
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert XLAAccelerator.joins_auto()  # is_available answers
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not XLAAccelerator.joins_auto()


@pytest.mark.parametrize(("devices", "name"), [(1, "single_xla"), (4, "xla")])
def test_s4_15_auto_takes_the_strategies_for_xla_devices(library: Library, devices: int, name: str) -> None:
    plan = resolve(Settings(accelerator="xla", devices=devices))
    assert plan.strategy.name == name  # type: ignore[union-attr]
    for strategy in ("ddp", "single_device", "fsdp"):
        with pytest.raises(ConfigurationError, match=r"needs a strategy that is made for it.*\"single_xla\".*\"xla\""):
            resolve(Settings(accelerator="xla", devices=1, strategy=strategy))
    with pytest.raises(ConfigurationError, match='works on the accelerator "xla" only'):
        resolve(Settings(accelerator="cpu", devices=1, strategy=name))


def test_s0_5_none_is_available_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    assert XLAAccelerator.auto_device_count() == 0
    assert not XLAAccelerator.is_available()
    with pytest.raises(
        ConfigurationError, match=r"XLAStrategy works .* not available here: torch_xla is not installed"
    ):
        resolve(Settings(strategy="xla"))
    assert XLAAccelerator.why_unavailable() == "torch_xla is not installed"


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_s0_5_none_is_available_with_a_library_that_does_not_fit(
    library: Library, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> int:
        raise error("undefined symbol")

    monkeypatch.setattr(library.modules["torch_xla.runtime"], "addressable_device_count", fails)
    assert not XLAAccelerator.is_available()
    assert XLAAccelerator.why_unavailable() == "torch_xla sees no device, or was built for another torch"


def test_s0_6_stats_are_what_the_runtime_counts(library: Library) -> None:
    assert XLAAccelerator().get_device_stats(DEVICE) == {"memory.used_kib": 2.0, "memory.peak_kib": 4.0}
    library.memory = {"bytes_used": 1024, "bytes_limit": 0}
    assert XLAAccelerator().get_device_stats(DEVICE) == {"memory.used_kib": 1.0}
    library.memory = None
    assert XLAAccelerator().get_device_stats(DEVICE) == {}
    assert set(library.calls) == {("memory", DEVICE)}  # and nothing that waits


def test_memory_and_waiting(library: Library) -> None:
    accelerator = XLAAccelerator()
    assert accelerator.memory_allocated(DEVICE) == 2048
    assert accelerator.max_memory_allocated(DEVICE) == 4096
    assert accelerator.total_memory(DEVICE) == 1 << 34
    library.calls.clear()
    accelerator.synchronize(DEVICE)
    assert library.calls == [("sync", True)]


TORCHS_OWN = """
import types
import torch
torch.utils.rename_privateuse1_backend("tpu")
module = types.ModuleType("torch.tpu")
module.device_count, module.is_available = (lambda: 2), (lambda: True)
torch._register_device_module("tpu", module)
from drivetrain.plan import resolve
from drivetrain.settings import Settings
for name in ("tpu", "auto"):
    plan = resolve(Settings(accelerator=name))
    print(type(plan.accelerator).__name__, *plan.devices, plan.strategy.name)
    torch.accelerator.current_accelerator = lambda *given, **options: torch.device("tpu")
try:
    resolve(Settings(accelerator="tpu", devices=1, strategy="single_xla"))
except Exception as error:
    print(error)
module.device_count = lambda: 0
print(*resolve(Settings(accelerator="cpu", devices=1)).devices)
"""


def test_a_torch_device_called_tpu_is_served_in_its_place(programs: Any, tmp_path: Path) -> None:
    done = programs.run("-c", TORCHS_OWN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    named, auto, refused, host = done.stdout.splitlines()
    assert named == auto == "TPUAccelerator tpu:0 tpu:1 ddp"
    assert refused.startswith('SingleDeviceXLAStrategy works on the accelerator "xla" only')
    assert host == "cpu"
