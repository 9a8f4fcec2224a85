"""The decision, row by row: settings and a made-up machine in, a plan with reasons or one clear error out."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.accelerators import (
    Accelerator,
    AcceleratorRegistry,
    CPUAccelerator,
    CUDAAccelerator,
    TorchDeviceAccelerator,
)
from drivetrain.base.registry import Entry, Registry
from drivetrain.checkpoints import CheckpointIO, TorchCheckpointIO
from drivetrain.clusters.environment import detect
from drivetrain.clusters.local import LocalEnvironment
from drivetrain.engine.engine import Engine
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.loggers import CSVLogger
from drivetrain.plan import Machine, Plan, resolve
from drivetrain.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from drivetrain.settings import Settings
from drivetrain.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from drivetrain.trainer.trainer import Trainer

MACHINE = Machine(environment=None, has_tensorboard=True)


class xpulib:
    """The vendor's library that the documents tell the reader to imagine, backed by torch's meta device."""

    count = 2
    available = True
    asked: list[Any]


class XPUAccelerator(Accelerator):
    """Spec E0-1: exactly the five methods that the document prints."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        xpulib.asked.append(devices)
        return [torch.device("meta", i) for i in devices]

    @staticmethod
    def auto_device_count() -> int:
        return xpulib.count

    @staticmethod
    def is_available() -> bool:
        return xpulib.available

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {}


@pytest.fixture(autouse=True)
def a_library_as_new() -> None:
    xpulib.count, xpulib.available, xpulib.asked = 2, True, []


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, as it speaks of its accelerator on a machine with two CUDA devices."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> None:
    if request.param == "gpu":
        request.getfixturevalue("two_gpus")


def plan_for(machine: Machine = MACHINE, **arguments: Any) -> Plan:
    return resolve(Settings(**arguments), machine)


def reasons(plan: Plan) -> dict[str, tuple[str, str]]:
    return {decision.what: (decision.choice, decision.why) for decision in plan.decisions}


# ---- accelerator -----------------------------------------------------------------------------------------------------


FIRST = "and of what is available here it comes first"


@pytest.mark.parametrize(
    ("machine", "given", "kind", "why"),
    [
        ("bare", "auto", CPUAccelerator, f'accelerator="auto", {FIRST}'),
        ("bare", "cpu", CPUAccelerator, 'accelerator="cpu"'),
        ("gpu", "auto", CUDAAccelerator, f'accelerator="auto", {FIRST}'),
        ("gpu", "gpu", CUDAAccelerator, f'accelerator="gpu", {FIRST}'),
        ("gpu", "cuda", CUDAAccelerator, 'accelerator="cuda"'),
        ("gpu", "cpu", CPUAccelerator, 'accelerator="cpu"'),
        ("gpu", CPUAccelerator(), CPUAccelerator, "accelerator= is an instance"),
        ("gpu", CPUAccelerator, CPUAccelerator, "accelerator= is an instance"),
        ("bare", XPUAccelerator(), XPUAccelerator, "accelerator= is an instance"),
        ("bare", XPUAccelerator, XPUAccelerator, "accelerator= is an instance"),
    ],
    indirect=["machine"],
)
def test_s0_8_s0_10_accelerator(machine: None, given: Any, kind: type[Accelerator], why: str) -> None:
    plan = plan_for(accelerator=given, devices=1)
    assert type(plan.accelerator) is kind
    assert reasons(plan)["accelerator"] == (plan.accelerator.name, why)
    if isinstance(given, Accelerator):
        assert plan.accelerator is given


@pytest.mark.parametrize(
    ("available", "auto", "gpu"),
    [
        ({"tpu", "mps", "cuda"}, "tpu", "mps"),
        ({"mps", "cuda"}, "mps", "mps"),
        ({"cuda", "xpu"}, "cuda", "cuda"),
        ({"xpu"}, "xpu", "xpu"),
        (set(), "cpu", None),
    ],
)
def test_s0_10_the_order_of_auto_and_gpu(
    monkeypatch: pytest.MonkeyPatch, available: set[str], auto: str, gpu: str | None
) -> None:
    for name in ("tpu", "mps", "cuda", "xpu"):
        cls: Any = AcceleratorRegistry.entry(name).cls
        monkeypatch.setattr(cls, "is_available", staticmethod(lambda name=name: name in available))
        monkeypatch.setattr(cls, "auto_device_count", staticmethod(lambda: 1))
    kind = next((torch.device(name) for name in ("cuda", "xpu") if name in available), None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
    assert plan_for(accelerator="auto").accelerator.name == auto
    if gpu is not None:
        assert plan_for(accelerator="gpu").accelerator.name == gpu
    else:
        with pytest.raises(ConfigurationError, match="torch sees no GPU .* Available: cpu"):
            plan_for(accelerator="gpu")


def define(name: str, priority: int | None = None, torchs: str = "meta") -> type[Accelerator]:
    """A user's class, registered by being defined."""

    class Own(XPUAccelerator):
        auto_priority = priority

        @staticmethod
        def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
            return [torch.device(torchs, i) for i in devices]

        @classmethod
        def register_accelerators(cls, accelerator_registry: Any) -> None:
            accelerator_registry.register(name, cls, description="Mine")

    return Own


@pytest.fixture
def registry() -> Iterator[Registry[Accelerator]]:
    """The accelerators, and afterwards without what the test has added."""
    before = dict(AcceleratorRegistry._registered)
    yield AcceleratorRegistry
    AcceleratorRegistry._registered.clear()
    AcceleratorRegistry._registered.update(before)


@pytest.mark.parametrize(("priority", "chosen"), [(None, "cuda"), (150, "cuda"), (250, "own")])
def test_s0_10_a_users_accelerator_may_join_auto(
    registry: Any, two_gpus: None, priority: int | None, chosen: str
) -> None:
    define("own", priority)
    assert plan_for().accelerator.name == chosen
    xpulib.available = False
    assert plan_for().accelerator.name == "cuda"


def test_an_accelerator_may_leave_auto_on_some_machines(registry: Any, two_gpus: None) -> None:
    own: Any = define("own", 250)
    own.joins_auto = classmethod(lambda cls: False)
    assert plan_for().accelerator.name == "cuda"
    assert plan_for(accelerator="own").accelerator.name == "own"


class MadeForXPU(SingleDeviceStrategy):
    facts = SingleDeviceStrategy.facts.but(accelerators=frozenset({"xpu"}))


def test_s4_15_an_accelerator_and_strategies_that_are_made_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"MadeForXPU works on the accelerator \"xpu\" only.*'cpu'"):
        plan_for(accelerator="cpu", strategy=MadeForXPU())
    assert plan_for(accelerator=XPUAccelerator(), devices=1, strategy=MadeForXPU()).accelerator.name == "xpu"
    monkeypatch.setattr(XPUAccelerator, "own_strategies_only", True)
    with pytest.raises(ConfigurationError, match="needs a strategy that is made for it, and SingleDeviceStrategy is"):
        plan_for(accelerator=XPUAccelerator(), devices=1, strategy="single_device")
    assert plan_for(accelerator=XPUAccelerator(), devices=1, strategy=MadeForXPU()).accelerator.name == "xpu"


def test_auto_takes_the_strategies_that_the_accelerator_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XPUAccelerator, "single_device_strategy", "ddp_fork")
    monkeypatch.setattr(XPUAccelerator, "parallel_strategy", "fsdp")
    assert plan_for(accelerator=XPUAccelerator(), devices=1).strategy.name == "ddp_fork"  # type: ignore[union-attr]
    assert plan_for(accelerator=XPUAccelerator(), devices=2).strategy.name == "fsdp"  # type: ignore[union-attr]
    notebook = replace(MACHINE, is_notebook=True)
    plan = resolve(Settings(accelerator=XPUAccelerator(), devices=2), notebook)
    assert plan.strategy.name == "fsdp"  # type: ignore[union-attr]


def test_who_registered_torchs_own_device_is_what_auto_means(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = define("xpu", torchs="xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert type(plan_for().accelerator) is own


def test_e0_2_a_name_that_only_torch_has_is_free(registry: Any) -> None:
    assert issubclass(registry.entry("xpu").cls, TorchDeviceAccelerator)
    own = define("xpu")
    assert type(plan_for(accelerator="xpu", devices=1).accelerator) is own
    assert "xpu" in registry.available_accelerators()
    assert registry["xpu"] == {
        "accelerator": own, "accelerator_name": "xpu", "description": "Mine", "init_params": {},
    }  # fmt: skip
    assert define("xpu") is not own  # the cell of a notebook, run again


@pytest.mark.parametrize("name", ["cpu", "cuda", "mps", "tpu", "xla"])
def test_a_name_of_ours_is_taken(registry: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' already belongs to .*Accelerator .*override=True"):
        define(name)
    registry.register(name, XPUAccelerator, override=True)
    assert type(plan_for(accelerator=name, devices=1).accelerator) is XPUAccelerator
    registry.remove(name)


def test_the_accelerator_that_a_strategy_carries(two_gpus: None) -> None:
    own = XPUAccelerator()
    plan = plan_for(strategy=SingleDeviceStrategy(accelerator=own))
    assert plan.accelerator is own
    assert reasons(plan)["accelerator"] == ("xpu", "the strategy carries it")
    assert plan_for(strategy=SingleDeviceStrategy(accelerator=own), accelerator=own).accelerator is own


@pytest.mark.parametrize("other", ["cpu", CPUAccelerator(), XPUAccelerator()])
def test_two_accelerators_contradict_each_other(other: Any) -> None:
    with pytest.raises(ConfigurationError, match="strategy carries a XPUAccelerator, and .* Give the accelerator once"):
        plan_for(strategy=SingleDeviceStrategy(accelerator=XPUAccelerator()), accelerator=other)


@pytest.mark.parametrize("given", [XPUAccelerator(), XPUAccelerator])
@pytest.mark.parametrize(("machine", "listed"), [("bare", "cpu"), ("gpu", "cpu, cuda")], indirect=["machine"])
def test_s0_5_an_accelerator_that_is_not_there(given: Any, machine: None, listed: str) -> None:
    xpulib.available = False
    with pytest.raises(ConfigurationError, match=f'XPUAccelerator says .* Available: {listed}. Write .*="auto"'):
        plan_for(accelerator=given)
    assert xpulib.asked == []  # it is asked before its devices are


@pytest.mark.parametrize(
    ("machine", "name", "why", "listed"),
    [
        (
            "bare",
            "cuda",
            "torch.cuda sees no device: .*" if torch.version.cuda else "this build of torch has no CUDA",
            "cpu",
        ),
        ("bare", "mps", "this build of torch has no MPS", "cpu"),
        ("bare", "tpu", "torch_xla is not installed", "cpu"),
        ("bare", "xla", "torch_xla is not installed", "cpu"),
        ("bare", "xpu", "torch.xpu sees no device", "cpu"),
        ("bare", "hpu", "install and import the package that brings it", "cpu"),
        ("gpu", "mps", "this build of torch has no MPS", "cpu, cuda"),
    ],
    indirect=["machine"],
)
def test_s0_12_a_device_that_is_not_there(machine: None, name: str, why: str, listed: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{name}' is not available here: .*{why}. Available: {listed}."):
        plan_for(accelerator=name)


@pytest.mark.parametrize(
    ("given", "tail"),
    [
        ("gpuu", "Did you mean 'gpu'? Known: auto, cpu, cuda, gpu, mps, tpu, xla."),
        ("cudaa", "Did you mean 'cuda'? Known: auto, cpu, cuda, gpu, mps, tpu, xla."),
        ("quantum", "Known: auto, cpu, cuda, gpu, mps, tpu, xla."),
        ("cuda:1", "Did you mean 'cuda'? Write accelerator=\"cuda\", devices=[1]."),
        ("privateuseone", "Known: auto, cpu, cuda, gpu, mps, tpu, xla."),
        (3, "Known: auto, cpu, cuda, gpu, mps, tpu, xla."),
        (None, "Known: auto, cpu, cuda, gpu, mps, tpu, xla."),
    ],
)
def test_unknown_accelerators(given: Any, tail: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan_for(accelerator=given)
    assert str(caught.value) == f"accelerator={given!r}: there is no such accelerator. {tail}"


# ---- a custom accelerator --------------------------------------------------------------------------------------------


def test_c1_five_methods_are_enough() -> None:
    accelerator = XPUAccelerator()
    assert accelerator.name == "xpu"
    accelerator.setup_device(torch.device("meta"))
    accelerator.setup(None)
    accelerator.teardown()


@pytest.mark.parametrize("missing", ["parse_devices", "get_parallel_devices", "auto_device_count", "is_available"])
def test_c1_and_each_of_them_is_needed(missing: str) -> None:
    members = {name: value for name, value in vars(XPUAccelerator).items() if name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (Accelerator,), members)()


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (1, [0]), ("1", [0]), ([1], [1]), ("auto", [0, 1]),
        (2, [0, 1]), ("2", [0, 1]), ([0, 1], [0, 1]), ("0,1", [0, 1]), (-1, [0, 1]), ("-1", [0, 1]),
        ("1,", [1]),
    ],
)  # fmt: skip
def test_c2_s0_2_devices_reach_it_as_indices(devices: Any, indices: list[int]) -> None:
    plan = plan_for(accelerator=XPUAccelerator(), devices=devices)
    assert plan.devices == tuple(torch.device("meta", index) for index in indices)
    assert (plan.num_processes, plan.start_method) == (len(indices), None if len(indices) == 1 else "popen")
    assert xpulib.asked == [indices]
    assert Trainer(accelerator=XPUAccelerator(), devices=devices, logger=False).device_ids == indices


@pytest.mark.parametrize(
    ("count", "strategy", "devices", "why"),
    [
        (1, "auto", "meta:0", 'devices="auto", and this accelerator has 1'),
        (3, "auto", "meta:0, meta:1, meta:2", 'devices="auto", and this accelerator has 3'),
        (3, "single_device", "meta:0",
         'devices="auto", and this accelerator has 3; SingleDeviceStrategy takes one'),
    ],
)  # fmt: skip
def test_s0_4_auto_devices_are_counted_by_the_accelerator(count: int, strategy: str, devices: str, why: str) -> None:
    xpulib.count = count
    plan = plan_for(accelerator=XPUAccelerator(), strategy=strategy)
    assert reasons(plan)["devices"] == (devices, why)


def test_c4_root_device_and_autocast_come_from_the_accelerator() -> None:
    engine = Engine(plan=plan_for(accelerator=XPUAccelerator()))
    assert engine.device == torch.device("meta", 0)
    assert engine.accelerator.autocast_device_type == "meta"
    asked: list[str] = []

    class Listening(Precision):
        def forward_context(self) -> None:
            asked.append(self.device_type)

    engine = Engine(plan=plan_for(accelerator=XPUAccelerator(), plugins=Listening()))
    engine.forward_context()
    assert asked == ["meta"]


def test_c4_the_root_device_is_the_one_that_was_chosen() -> None:
    engine = Engine(plan=plan_for(accelerator=XPUAccelerator(), devices=[1]))
    assert engine.plan.devices == (torch.device("meta", 1),)
    assert engine.device == torch.device("meta", 1)


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["cpu", XPUAccelerator()])
@pytest.mark.parametrize("devices", [0, "0", [], "", None, True, False])
def test_s0_2_no_device_is_no_request(accelerator: Any, devices: Any) -> None:
    with pytest.raises(ConfigurationError, match='names no device. Write devices=1 or devices="auto"'):
        plan_for(accelerator=accelerator, devices=devices)
    assert xpulib.asked == []


@pytest.mark.parametrize("devices", ["all", "0,x", "1.5"])
def test_a_text_that_names_no_device(devices: str) -> None:
    with pytest.raises(ConfigurationError, match="devices") as caught:
        plan_for(accelerator=XPUAccelerator(), devices=devices)
    assert repr(devices) in str(caught.value)


def test_the_cpu_is_one_device() -> None:
    for devices in (1, "1", "auto"):
        assert plan_for(accelerator="cpu", devices=devices).devices == (torch.device("cpu"),)
    assert plan_for(accelerator="cpu", devices=2).devices == (torch.device("cpu"),) * 2
    with pytest.raises(ConfigurationError, match="On the CPU, devices is a number of processes"):
        plan_for(accelerator="cpu", devices=[0])


@pytest.mark.usefixtures("two_gpus")
def test_one_of_two_of_torchs_devices() -> None:
    assert plan_for(accelerator="gpu", devices=[1]).devices == (torch.device("cuda", 1),)
    assert plan_for(devices=1).devices == (torch.device("cuda", 0),)
    assert plan_for().devices == plan_for(devices=-1).devices == (torch.device("cuda", 0), torch.device("cuda", 1))
    with pytest.raises(ConfigurationError, match=r"devices=\[2\] means the devices \[2\], but this machine has 2"):
        plan_for(devices=[2])


# ---- strategy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"), [("auto", "there is one device"), ("single_device", 'strategy="single_device"')]
)
def test_strategy_names(given: str, why: str) -> None:
    plan = plan_for(strategy=given)
    assert isinstance(plan.strategy, Entry)
    assert plan.strategy.cls is SingleDeviceStrategy
    assert reasons(plan)["strategy"] == ("SingleDeviceStrategy", why)


def test_a_strategy_instance_is_taken_and_completed() -> None:
    own = SingleDeviceStrategy()
    plan = plan_for(strategy=own, accelerator="cpu", precision="bf16-mixed")
    assert plan.strategy is own
    assert reasons(plan)["strategy"] == ("SingleDeviceStrategy", "strategy= is an instance")
    assert own.accelerator is None  # nothing is built by deciding
    engine = Engine(plan=plan)
    assert engine.strategy is own
    assert own.accelerator is plan.accelerator
    assert own.precision_plugin is plan.precision


@pytest.mark.parametrize(
    ("name", "tail"),
    [("single_dev", "Did you mean 'single_device'?"), ("single_devise", "Did you mean 'single_device'?")],
)
def test_unknown_strategies(name: str, tail: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"no strategy called '{name}'. {tail}.*Known: ddp,.* single_device"
    ) as caught:
        plan_for(strategy=name)
    assert not isinstance(caught.value, NotSupportedError)


@pytest.mark.parametrize(
    ("given", "cure"), [(None, '"auto"'), (3, '"auto"'), (SingleDeviceStrategy, r"SingleDeviceStrategy\(\)")]
)
def test_what_is_no_strategy(given: Any, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=f"a strategy is a name or a Strategy instance. Write strategy={cure}"):
        plan_for(strategy=given)


class Split(SingleDeviceStrategy):
    """Drives all devices of its machine in one process."""

    facts = SingleDeviceStrategy.facts.but(drives_all_devices=True)


class SplitOnNodes(DDPStrategy):
    """The same on every machine."""

    facts = DDPStrategy.facts.but(drives_all_devices=True)


def test_one_process_may_drive_all_devices() -> None:
    plan = resolve(Settings(accelerator="cpu", strategy=Split(), devices=3), MACHINE)
    assert (len(plan.devices), plan.num_processes, plan.start_method) == (3, 1, None)
    with pytest.raises(ConfigurationError, match='Split trains in one process, .*Write strategy="ddp", or num_nodes=1'):
        resolve(Settings(accelerator="cpu", strategy=Split(), devices=2, num_nodes=2), MACHINE)
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy trains on one device"):
        resolve(Settings(accelerator="cpu", strategy=SingleDeviceStrategy(), devices=2), MACHINE)


def test_and_one_of_two_gpus_is_not_left_out(two_gpus: None) -> None:
    assert len(resolve(Settings(accelerator="cuda", strategy=Split()), MACHINE).devices) == 2
    assert len(resolve(Settings(accelerator="cuda", strategy=SingleDeviceStrategy()), MACHINE).devices) == 1


def test_one_process_on_each_machine_may_drive_its_devices() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "1"}
    machine = replace(MACHINE, environment=(LocalEnvironment(environ), "by hand"))
    plan = resolve(Settings(accelerator="cpu", strategy=SplitOnNodes(), devices=3, num_nodes=2), machine)
    assert (len(plan.devices), plan.num_processes, plan.start_method) == (3, 1, None)
    strategy = Engine(plan=plan).strategy
    assert (strategy.world_size, strategy.global_rank, strategy.local_rank) == (2, 1, 0)


def test_t56_a_distributed_strategy_says_so_itself() -> None:
    class Many(SingleDeviceStrategy):
        facts = SingleDeviceStrategy.facts.but(is_distributed=True)

    many = replace(
        MACHINE, environment=(LocalEnvironment({"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}), "")
    )
    assert plan_for(many, strategy=Many(), devices=2, accelerator="cpu").start_method is None
    with pytest.raises(ConfigurationError, match="2 were started"):
        plan_for(many, strategy="single_device", devices=2, accelerator="cpu")


# ---- precision and plugins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name", "kind"),
    [
        *((given, "32-true", Precision) for given in (None, 32, "32", "32-true")),
        *((given, "bf16-mixed", MixedPrecision) for given in ("bf16", "bf16-mixed")),
        *((given, "16-mixed", MixedPrecision) for given in (16, "16", "16-mixed")),
        *((given, "64-true", DoublePrecision) for given in (64, "64", "64-true")),
        ("16-true", "16-true", HalfPrecision),
        ("bf16-true", "bf16-true", HalfPrecision),
    ],
)
def test_precision_names(given: Any, name: str, kind: type[Precision]) -> None:
    plan = plan_for(precision=given)
    assert type(plan.precision) is kind
    assert plan.precision.name == name
    assert reasons(plan)["precision"] == (name, "it is the default" if given is None else f"precision={given!r}")


def test_64_bits_need_an_accelerator_that_has_them() -> None:
    class Short(CPUAccelerator):
        supports_float64 = False

    with pytest.raises(ConfigurationError, match='has no 64-bit floats. Write precision="32-true"'):
        plan_for(accelerator=Short(), precision="64-true")


@pytest.mark.parametrize(
    ("given", "package"),
    [
        ("transformer-engine", "transformer_engine"),
        ("transformer-engine-float16", "transformer_engine"),
        ("float8", "torchao"),
    ],
)
def test_a_precision_without_its_package_says_which_one(
    given: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=f"needs the package {package},.* not installed. Run `pip install"):
        plan_for(precision=given)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("bf16-mix", "Did you mean 'bf16-mixed'?"),
        (8, "precision. Known: 16, "),
        ("fp16", "Did you mean '16-mixed'?"),
        ("float16", "Did you mean '16-mixed'?"),
        ("half", "Did you mean '16-mixed'?"),
        ("amp", "Did you mean '16-mixed'?"),
        ("bfloat16", "Did you mean 'bf16-mixed'?"),
        ("torch.bfloat16", "Did you mean 'bf16-mixed'?"),
        ("fp32", "Did you mean '32-true'?"),
        ("fp8", "Did you mean 'float8'?"),
        ("torch.float8_e4m3fn", "Did you mean 'float8'?"),
        ("float32", "Did you mean '32-true'?"),
        ("double", "Did you mean '64-true'?"),
    ],
)
def test_unknown_precisions(given: Any, hint: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no such precision") as caught:
        plan_for(precision=given)
    assert not isinstance(caught.value, NotSupportedError)
    assert hint in str(caught.value)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name"), [(torch.float16, "16-mixed"), (torch.float64, "64-true"), (1.5, "bf16-mixed")]
)
def test_a_dtype_as_precision_is_answered_with_the_name(given: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f'a precision is a name .* Write precision="{name}"'):
        plan_for(precision=given)


class OwnIO(TorchCheckpointIO):
    pass


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "in a list"])
def test_plugins_win(wrapped: bool) -> None:
    precision: Any = MixedPrecision()
    plan = plan_for(plugins=[precision] if wrapped else precision)
    assert plan.precision is precision
    assert plan.checkpoint_io is None
    assert reasons(plan)["precision"] == ("bf16-mixed", "it was passed in plugins=")
    store: CheckpointIO = OwnIO()
    plan = plan_for(plugins=[None, store] if wrapped else store)
    assert plan.checkpoint_io is store
    assert Engine(plan=plan).strategy.checkpoint_io is store
    assert plan.precision.name == "32-true"


def test_precision_is_given_once() -> None:
    with pytest.raises(ConfigurationError, match=r"precision='bf16' and a MixedPrecision .* Leave precision out"):
        plan_for(precision="bf16", plugins=[MixedPrecision()])


@pytest.mark.parametrize(
    "carried", [MixedPrecision(), type("Own", (Precision,), {"name": "own"})()], ids=["mixed", "own"]
)
def test_the_precision_that_a_strategy_carries_is_in_the_plan(carried: Precision) -> None:
    plan = plan_for(strategy=SingleDeviceStrategy(precision_plugin=carried))
    assert plan.precision is carried
    assert reasons(plan)["precision"][0] == carried.name
    assert Engine(plan=plan).precision is carried


def test_a_second_precision_beside_the_strategys_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="precision"):
        plan_for(strategy=SingleDeviceStrategy(precision_plugin=MixedPrecision()), precision="32-true")


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ([Precision(), MixedPrecision()], "two of a kind: Precision and MixedPrecision. Keep one"),
        ([TorchCheckpointIO(), OwnIO()], "two of a kind: TorchCheckpointIO and OwnIO. Keep one"),
        ("slrum", "got a str: 'slrum'. Did you mean 'slurm'?.* Pass a Precision, a CheckpointIO"),
        (
            [object()],
            "got an object: .* Pass a Precision, a CheckpointIO, a ClusterEnvironment or a LayerSync, at most",
        ),
        (Precision, "got the class Precision itself. Write Precision"),
    ],
)
def test_wrong_plugins(plugins: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_for(plugins=plugins)


# ---- logger, launchers, the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "arguments", "logger", "why"),
    [
        (MACHINE, {}, "TensorBoardLogger", "tensorboard is installed"),
        (MACHINE, {"logger": True}, "TensorBoardLogger", "tensorboard is installed"),
        (dataclasses.replace(MACHINE, has_tensorboard=False), {}, "CSVLogger", "tensorboard is not installed"),
        (MACHINE, {"logger": False}, None, "logger=False"),
        (MACHINE, {"logger": []}, None, "it was passed as logger="),
        (MACHINE, {"fast_dev_run": True}, "DummyLogger", "fast_dev_run logs nothing"),
        (MACHINE, {"logger": CSVLogger("x")}, "CSVLogger", "it was passed as logger="),
        (MACHINE, {"logger": [CSVLogger("x"), CSVLogger("y")]}, "CSVLogger, CSVLogger", "it was passed as logger="),
    ],
)
def test_logger(machine: Machine, arguments: dict[str, Any], logger: str | None, why: str) -> None:
    plan = plan_for(machine, **arguments)
    assert plan.default_logger == logger
    assert reasons(plan)["logger"] == (logger or "none", why)


# ---- several processes -----------------------------------------------------------------------------------------------


def torchrun(world_size: int, local: int | None = None) -> Machine:
    """As torchrun would have started this process."""
    environ = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local or world_size),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run",
    }  # fmt: skip
    return Machine.detect(environ)


def chosen(plan: Plan) -> str:
    return reasons(plan)["strategy"][0]


@pytest.mark.parametrize(
    ("machine", "arguments", "strategy", "devices"),
    [
        (torchrun(2), {"accelerator": "cpu"}, "DDPStrategy", 2),
        (torchrun(2), {"accelerator": "cpu", "devices": 2}, "DDPStrategy", 2),
        (torchrun(2), {"accelerator": "cpu", "strategy": "ddp"}, "DDPStrategy", 2),
        (torchrun(4, local=2), {"accelerator": "cpu", "num_nodes": 2}, "DDPStrategy", 2),
        (torchrun(1), {"accelerator": "cpu"}, "SingleDeviceStrategy", 1),
        (torchrun(1), {"accelerator": "cpu", "strategy": "ddp"}, "DDPStrategy", 1),
        (torchrun(2), {"accelerator": XPUAccelerator()}, "DDPStrategy", 2),
    ],
)
def test_processes_that_somebody_started(
    machine: Machine, arguments: dict[str, Any], strategy: str, devices: int
) -> None:
    plan = plan_for(machine, **arguments)
    assert chosen(plan) == strategy
    assert len(plan.devices) == devices
    assert "TorchElastic" in reasons(plan)["processes"][0]


@pytest.mark.parametrize(
    ("machine", "arguments", "said"),
    [
        (torchrun(2), {"devices": 3}, "3"),
        (torchrun(2), {"strategy": "single_device"}, "trains in one process, and 2 were started. Write strategy"),
        (MACHINE, {"devices": 2, "strategy": "single_device"}, 'Write strategy="ddp", or devices=1'),
        (MACHINE, {"num_nodes": 2, "strategy": "single_device"}, "num_nodes=2"),
    ],
)
def test_processes_and_devices_that_contradict_each_other(
    machine: Machine, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        plan_for(machine, accelerator="cpu", **arguments)


@pytest.mark.parametrize(
    ("strategy", "start"),
    [
        ("auto", "popen"), ("ddp", "popen"), ("ddp_find_unused_parameters_true", "popen"),
        ("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "fork"),
        ("ddp_spawn_find_unused_parameters_true", "spawn"), ("ddp_fork_find_unused_parameters_false", "fork"),
        (DDPStrategy(start_method="forkserver"), "forkserver"),
        ("ddp_ray", "ray"), ("ddp_ray_find_unused_parameters_true", "ray"),
        (DDPStrategy(start_method="ray"), "ray"),
    ],
)  # fmt: skip
def test_processes_that_are_started_here(strategy: Any, start: str) -> None:
    plan = plan_for(accelerator="cpu", devices=2, strategy=strategy)
    assert (plan.start_method, plan.num_processes) == (start, 2)
    choice, why = reasons(plan)["processes"]
    assert choice == f"2, started by {start}"
    assert why.endswith("; DDPStrategy starts them so")
    assert plan_for(torchrun(2), accelerator="cpu", strategy=strategy).start_method is None


NOBODY = "no launcher or cluster has started the program"
BY_HAND = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "1"}
ONE_OF_TWO = {**BY_HAND, "NODE_RANK": "0", "LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}
IN_TORCHRUN = {**ONE_OF_TWO, "TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0"}
IN_SLURM = {
    "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train",
    "SLURM_JOB_ID": "7", "SLURM_NODELIST": "a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "arguments", "choice", "why"),
    [
        ({}, {}, "this one", NOBODY),
        ({}, {"strategy": "ddp"}, "this one", NOBODY),
        ({}, {"devices": 2}, "2, started by popen", f"{NOBODY}; DDPStrategy starts them so"),
        ({}, {"devices": 2, "strategy": "ddp_spawn"}, "2, started by spawn", f"{NOBODY}; DDPStrategy starts them so"),
        (BY_HAND, {"devices": 2, "num_nodes": 2}, "2 on each of 2 machines, started by popen",
         f"{NOBODY}; DDPStrategy starts them so"),
        (BY_HAND, {"devices": 1, "num_nodes": 2}, "one on each of 2 machines", NOBODY),
        (ONE_OF_TWO, {"devices": 2}, "2, started already",
         "a launcher has started this one, with LOCAL_RANK=1"),
        (ONE_OF_TWO, {"devices": 2, "strategy": "ddp_spawn"}, "2, started already",
         "a launcher has started this one, with LOCAL_RANK=1"),
        (IN_TORCHRUN, {}, "2, started by TorchElastic", "torchrun has set TORCHELASTIC_RUN_ID"),
        (IN_TORCHRUN, {"strategy": "ddp_spawn"}, "2, started by TorchElastic", "torchrun has set TORCHELASTIC_RUN_ID"),
        (IN_SLURM, {}, "1, started by SLURM", "SLURM has set SLURM_NTASKS, and the job is not interactive"),
        ({**IN_SLURM, "SLURM_JOB_NAME": "bash"}, {}, "this one", NOBODY),
    ],
)  # fmt: skip
def test_the_plan_never_says_that_nobody_has_started_a_process_that_was_started(
    environ: dict[str, str], arguments: dict[str, Any], choice: str, why: str
) -> None:
    plan = plan_for(replace(MACHINE, environment=detect(environ)), accelerator="cpu", **arguments)
    assert reasons(plan)["processes"] == (choice, why)


def test_a_process_that_the_program_has_started_says_so() -> None:
    machine = replace(MACHINE, environment=detect(ONE_OF_TWO), is_rank_of_program=True)
    plan = plan_for(machine, accelerator="cpu", strategy="ddp", devices=2)
    assert reasons(plan)["processes"] == (
        "2, started already", "the process that you started has started this one, with LOCAL_RANK=1"
    )  # fmt: skip


def test_several_devices_in_a_notebook() -> None:
    plan = plan_for(replace(MACHINE, is_notebook=True), accelerator="cpu", devices=2)
    assert (chosen(plan), plan.start_method) == ("DDPStrategy", "fork")


def test_one_process_needs_no_other_to_start() -> None:
    plan = plan_for(accelerator="cpu", strategy="ddp", devices=1)
    assert plan.start_method is None
    assert reasons(plan)["processes"][0] == "this one"


@pytest.mark.parametrize("devices", [1, 2])
def test_ray_chooses_the_machines_and_the_devices(two_gpus: None, devices: int) -> None:
    """So nobody has to say where they meet, as the other ways to start want it."""
    plan = plan_for(accelerator="gpu", devices=devices, num_nodes=2, strategy="ddp_ray")
    assert (plan.start_method, plan.num_nodes, plan.num_processes) == ("ray", 2, devices)
    with pytest.raises(ConfigurationError, match="MASTER_ADDR and MASTER_PORT are not set"):
        plan_for(accelerator="gpu", devices=devices, num_nodes=2, strategy="ddp_spawn")
    with pytest.raises(ConfigurationError, match=r"devices=\[1\] names devices, but Ray chooses .* Write devices=1"):
        plan_for(accelerator="gpu", devices=[1], strategy="ddp_ray")
    assert plan_for(torchrun(2), accelerator="gpu", devices=[1, 0], strategy="ddp_ray").start_method is None


def test_a_device_of_a_kind_that_has_no_jobs_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(XPUAccelerator):
        supports_several_devices = False

    with pytest.raises(ConfigurationError, match="cannot exchange gradients: devices=2"):
        plan_for(torchrun(2), accelerator=Alone(), devices=2)


def test_a_cluster_environment_of_ones_own_wins() -> None:
    own = LocalEnvironment({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"})
    plan = plan_for(torchrun(1), accelerator="cpu", plugins=own)
    assert plan.environment is own
    assert reasons(plan)["processes"] == ("2, started already", "it was passed in plugins=")
    with pytest.raises(ConfigurationError, match="Give the cluster environment once"):
        plan_for(accelerator="cpu", plugins=own, strategy=DDPStrategy(cluster_environment=LocalEnvironment({})))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"precision": "bf16"}, {"accelerator": XPUAccelerator(), "logger": False}],
    ids=["default", "bf16", "own accelerator"],
)
def test_the_text_gives_a_reason_per_line(arguments: dict[str, Any], tmp_path: Path) -> None:
    title, *lines = str(plan_for(**arguments)).splitlines()
    assert title == "drivetrain plan"
    assert [line.split()[0] for line in lines] == [
        "accelerator",
        "devices",
        "strategy",
        "processes",
        "precision",
        "logger",
    ]
    assert len({line.index("because ") for line in lines}) == 1  # one column
    assert all(line.partition("because ")[2] for line in lines)


def test_deciding_builds_nothing() -> None:
    plan = plan_for()
    assert isinstance(plan.strategy, Entry)
    assert issubclass(plan.strategy.cls, Strategy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.devices = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    "arguments", [{"devices": 1}, {"accelerator": "cpu"}], ids=["devices beside it", "another accelerator"]
)
def test_s0_3_a_device_that_the_strategy_names_is_named_once(arguments: Any) -> None:
    given = {"accelerator": XPUAccelerator(), **arguments}
    with pytest.raises(ConfigurationError, match="The strategy names the device meta:3, which contradicts"):
        plan_for(strategy=SingleDeviceStrategy(device="meta:3"), **given)
    plan = plan_for(strategy=SingleDeviceStrategy(device="meta:3"), accelerator=XPUAccelerator())
    assert plan.devices == (torch.device("meta:3"),)
    assert reasons(plan)["devices"] == ("meta:3", "the strategy names it")


def test_a_strategy_may_serve_a_second_trainer_with_other_arguments() -> None:
    from drivetrain import Engine

    strategy = SingleDeviceStrategy()
    assert Engine(strategy=strategy, accelerator="cpu", precision="bf16-mixed").precision.name == "bf16-mixed"
    assert Engine(strategy=strategy, precision="32-true").precision.name == "32-true"
    assert Engine(strategy=strategy).precision.name == "32-true"
