"""Strategies that are written for Fabric: each override is called with Fabric's signature, and ``super()`` works."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import strategies as plain
from drivetrain.compat import fabric_strategies as served
from drivetrain.compat.fabric_deepspeed import FabricDeepSpeedStrategy, _Trained
from drivetrain.compat.fabric_strategies import MEMBERS, REFUSED
from drivetrain.engine.wrappers import EngineModule, OptimizerHandle
from drivetrain.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.usefixtures("served")

BASES = {"SingleDeviceStrategy": plain.SingleDeviceStrategy, "DDPStrategy": plain.DDPStrategy}
OF_SEVERAL = {"distributed_sampler_kwargs", "num_processes"}  # with one device nobody asks
# no method: attributes, what a constructor takes, and what a program defines for itself
NOT_OVERRIDDEN = {
    "accelerator", "checkpoint_io", "parallel_devices", "cluster_environment", "num_nodes", "process_group_backend",
    "facts", "register_strategies", "_backward_sync_control", "module_sharded_context",
}  # fmt: skip
METHODS = sorted(MEMBERS - NOT_OVERRIDDEN)
METHODS_OF_RANKS = [name for name in METHODS if not name.endswith(("_rank", "world_size"))]


def fabric_base(name: str) -> Any:
    return getattr(importlib.import_module("lightning.fabric.strategies"), name)


def calling_super(base: type, names: list[str], calls: Counter[str], given: dict[str, Any] | None = None) -> Any:
    """A strategy that overrides ``names``, counts, keeps the arguments by the names of Fabric, and calls super."""

    def method(name: str) -> Any:
        signature = inspect.signature(getattr(base, name))

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            bound = signature.bind(self, *args, **kwargs)  # a TypeError where this is no call that Fabric makes
            if given is not None:
                given.setdefault(name, dict(bound.arguments))
            return getattr(super(made, self), name)(*args, **kwargs)

        return call

    def getter(name: str) -> property:
        def read(self: Any) -> Any:
            calls[name] += 1
            return getattr(super(made, self), name)

        return property(read)

    members = {name: method(name) if callable(getattr(base, name, None)) else getter(name) for name in names}
    for name in ("global_rank", "local_rank", "node_rank", "world_size"):
        if name in members:  # a strategy of several processes learns its ranks, unless it says them itself
            members[name] = property(lambda self, name=name: calls.update([name]) or int(name == "world_size"))
    made = type("Mine", (base,), members)
    return made


def program(strategy: Any, folder: Path, precision: str = "32-true", devices: int = 1) -> dict[str, Any]:
    """A loop with everything of Fabric that reaches a strategy; returns what must not depend on who did it."""
    import lightning as L

    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision)
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module(empty_init=False), fabric.sharded_model():
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with fabric.init_tensor():
        made = torch.zeros(2)
    scheduled = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 3)
    model, optimizer, scheduler = fabric.setup(net, scheduled, scheduler=scheduler)
    alone = fabric.setup_module(nn.Linear(1, 1))
    by_itself = fabric.setup_optimizers(torch.optim.SGD(alone.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=2))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).float().square().sum()
        fabric.backward(loss)
        return loss

    for index, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward((model(x) - y).square().mean(), model=model)
        if index % 2:
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            fabric.clip_gradients(model, optimizer, clip_val=0.3)
            optimizer.step()
            optimizer.zero_grad()
    loss = optimizer.step(closure)
    scheduler.step()
    fabric.backward(alone(torch.ones(1, 1)).sum())
    by_itself.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3, "loader": loader}
    fabric.save(folder / "x.ckpt", state, filter={"model": lambda name, value: name != "1.bias"})
    if fabric.is_global_zero:
        torch.save(net.state_dict(), folder / "raw.pt")
    fabric.barrier()
    weights = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    optimizer.state.clear()
    state |= {"step": 0, "other": 1}
    rest = fabric.load(folder / "x.ckpt", state, strict=False)
    loaded = copy.deepcopy(net.state_dict())
    everything = fabric.load(folder / "x.ckpt")
    fabric.load_raw(folder / "raw.pt", model)
    assert isinstance(state["model"], EngineModule)
    assert type(state["optimizer"]) is OptimizerHandle
    moved = nn.Linear(1, 1)
    assert fabric.to_device(moved) is moved
    found = {
        "weights": weights, "loaded": loaded, "raw": copy.deepcopy(net.state_dict()), "step": state["step"],
        "rest": rest, "everything": everything, "optimizer": optimizer.state_dict(), "norm": norm, "loss": loss,
        "moved": fabric.to_device({"x": torch.ones(1)}), "made": made, "alone": alone.state_dict(),
        "reduced": fabric.all_reduce(torch.ones(2), reduce_op="sum"), "gathered": fabric.all_gather(torch.ones(2)),
        "told": fabric.broadcast(4), "agreed": fabric.strategy.reduce_boolean_decision(True),
        "ranks": [fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size],
    }  # fmt: skip
    fabric.barrier("here")
    fabric.teardown()
    return found


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_every_member_is_called_as_fabric_calls_it_and_the_results_stay(
    precision: str, base: str, tmp_path: Path
) -> None:
    calls: Counter[str] = Counter()
    names = [name for name in METHODS if base == "DDPStrategy" or name not in OF_SEVERAL]
    found = program(calling_super(fabric_base(base), names, calls)(), tmp_path, precision)
    assert set(calls) == set(names)
    torch.testing.assert_close(found, program(BASES[base](), tmp_path, precision), rtol=0, atol=0)


def test_the_arguments_are_fabrics(tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    program(calling_super(fabric_base("DDPStrategy"), METHODS, Counter(), given)(), tmp_path)
    assert type(given["module_to_device"]["module"]) is type(given["setup_module"]["module"]) is nn.Sequential
    assert given["setup_module_and_optimizers"]["scheduler"] is not None
    for name in ("backward", "clip_gradients_norm", "clip_gradients_value", "get_module_state_dict"):
        assert isinstance(given[name]["module"], DistributedDataParallel), name
    assert given["batch_to_device"]["device"] == torch.device("cpu")
    assert type(given["optimizer_step"]["optimizer"]) is torch.optim.Adam
    assert given["clip_gradients_norm"]["max_norm"] == 1.0
    assert given["all_reduce"]["reduce_op"] == "sum"
    for name in ("save_checkpoint", "load_checkpoint"):
        assert isinstance(given[name]["state"]["model"], DistributedDataParallel)
        assert type(given[name]["state"]["optimizer"]) is torch.optim.Adam
        assert given[name]["path"] == tmp_path / "x.ckpt"
    assert given["save_checkpoint"]["filter"].keys() == {"model"}
    assert given["load_checkpoint"]["strict"] is False


@pytest.mark.parametrize("name", METHODS)
def test_each_member_alone(name: str, tmp_path: Path, expected: dict[str, Any]) -> None:
    calls: Counter[str] = Counter()
    found = program(calling_super(fabric_base("DDPStrategy"), [name], calls)(), tmp_path)
    assert calls[name] > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from drivetrain import compat

    compat.install()
    try:
        return program("ddp", tmp_path_factory.mktemp("expected"))
    finally:
        compat.uninstall()


def on_two_ranks(folder: Path) -> dict[str, Any]:
    from drivetrain import compat

    compat.install()
    try:
        found = program(calling_super(fabric_base("DDPStrategy"), METHODS_OF_RANKS, Counter())(), folder, devices=2)
        torch.testing.assert_close(found, program("ddp", folder, devices=2), rtol=0, atol=0)
    finally:
        compat.uninstall()
    return found["weights"]


def test_two_processes_train_the_same_as_with_the_plain_strategy(
    pool: Any, tmp_path: Path, expected: dict[str, Any]
) -> None:
    one, other = pool.run(on_two_ranks, tmp_path, group=False)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(one["0.weight"], expected["weights"]["0.weight"])  # each saw its own part of the data


# ---- bodies of one's own ---------------------------------------------------------------------------------------------


def test_a_strategy_may_be_written_from_its_base_alone(tmp_path: Path, expected: dict[str, Any]) -> None:
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies import Strategy

    class Whole(Strategy):
        def __init__(self) -> None:
            super().__init__()
            self.precision = Precision()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def is_global_zero(self) -> bool:
            return True

        def module_to_device(self, module: nn.Module) -> None:
            module.to(self.root_device)

        def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
            return tensor

        def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            return tensor

        def barrier(self, *args: Any, **kwargs: Any) -> None:
            pass

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return obj

        def backward(self, tensor: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            self.precision.backward(tensor, *args, **kwargs)

        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
            return optimizer.step(**kwargs)

        def setup_module_and_optimizers(self, module: Any, optimizers: Any, scheduler: Any = None) -> Any:
            return self.setup_module(module), optimizers  # of an earlier Fabric: without the scheduler

    torch.testing.assert_close(program(Whole(), tmp_path), expected, rtol=0, atol=0)


def test_the_control_of_the_exchange_is_asked(tmp_path: Path) -> None:
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl

    asked: list[tuple[nn.Module, bool]] = []

    class Control(_BackwardSyncControl):
        def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
            asked.append((module, enabled))
            return nullcontext()

    class Mine(SingleDeviceStrategy):
        def __init__(self) -> None:
            super().__init__()
            self._backward_sync_control = Control()

    engine = drivetrain.Engine(accelerator="cpu", strategy=Mine())
    model = engine.setup(net := nn.Linear(1, 1))
    for enabled in (True, False):
        with engine.no_backward_sync(model, enabled=enabled):
            pass
    assert asked == [(net, True), (net, False)]


def test_what_setup_returns_is_what_is_used() -> None:
    from lightning.fabric.strategies import SingleDeviceStrategy

    class Slower(torch.optim.SGD):
        pass

    class Mine(SingleDeviceStrategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            return nn.Sequential(super().setup_module(module), nn.Flatten(0))

        def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
            return Slower(optimizer.param_groups[0]["params"], lr=0.5)

        def setup_module_and_optimizers(self, module: Any, optimizers: Any, scheduler: Any = None) -> Any:
            return *super().setup_module_and_optimizers(module, optimizers, scheduler)[:2], "scheduler"

        @contextmanager
        def module_sharded_context(self) -> Any:
            entered.append(self)
            yield

    entered: list[Any] = []
    engine = drivetrain.Engine(accelerator="cpu", strategy=Mine(), precision="64-true")
    net = nn.Linear(1, 1)
    model, optimizer, scheduler = engine.setup(net, torch.optim.SGD(net.parameters(), lr=1.0), scheduler="given")
    assert (type(optimizer.optimizer), scheduler) == (Slower, "scheduler")
    assert type(engine.setup_optimizers(torch.optim.SGD(net.parameters())).optimizer) is Slower
    assert net.weight.dtype is torch.float64  # converted before setup_module, and once
    assert model(torch.ones(2, 1)).shape == (2,)
    with engine.sharded_model():
        pass
    assert entered == [engine.strategy]


def test_states_in_a_form_of_ones_own(tmp_path: Path) -> None:
    from lightning.fabric.strategies import SingleDeviceStrategy

    class Mine(SingleDeviceStrategy):
        def get_module_state_dict(self, module: nn.Module) -> Any:
            return {f"own/{name}": value for name, value in super().get_module_state_dict(module).items()}

        def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
            super().load_module_state_dict(
                module, {name.removeprefix("own/"): value for name, value in state_dict.items()}, strict
            )

        def get_optimizer_state(self, optimizer: Optimizer) -> Any:
            return super().get_optimizer_state(optimizer) | {"note": 1}

    engine = drivetrain.Engine(accelerator="cpu", strategy=Mine())
    net = nn.Linear(2, 2)
    model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    engine.save(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer})
    file = torch.load(tmp_path / "x.ckpt")
    assert set(file["model"]) == {"own/weight", "own/bias"}
    assert file["optimizer"]["note"] == 1
    before = net.weight.detach().clone()
    nn.init.zeros_(net.weight)
    engine.load(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer})
    assert torch.equal(net.weight, before)


def test_a_file_that_does_not_fit_restores_nothing(tmp_path: Path) -> None:
    from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

    for base in (SingleDeviceStrategy, DDPStrategy):
        engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=type("Mine", (base,), {})())
        model = engine.setup(net := nn.Linear(2, 2))
        torch.save({"model": {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}}, tmp_path / "x.ckpt")
        with pytest.raises(CheckpointError, match=r"of another shape: weight"):
            engine.load(tmp_path / "x.ckpt", {"model": model})
        assert net.weight.any()
        with pytest.raises(ConfigurationError, match='{"model": model}'):
            engine.load(tmp_path / "x.ckpt", model)
        engine.teardown()


# ---- the classes under their names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["lightning.fabric", "lightning_fabric"])
def test_the_names_and_where_they_are_found(root: str) -> None:
    strategies = importlib.import_module(f"{root}.strategies")
    for name, module in (
        ("DDPStrategy", "ddp"), ("ParallelStrategy", "parallel"), ("SingleDeviceStrategy", "single_device"),
        ("Strategy", "strategy"),
    ):  # fmt: skip
        own = name if name == "Strategy" else f"Fabric{name}"  # else a bare DDPStrategy would be ambiguous
        assert getattr(strategies, name) is getattr(served, own)
        assert getattr(importlib.import_module(f"{root}.strategies.{module}"), name) is getattr(served, own)


def test_a_name_stands_for_the_plain_class_in_isinstance() -> None:
    from lightning.fabric.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy

    default = drivetrain.Engine(accelerator="cpu", devices=1).strategy
    several = drivetrain.Engine(accelerator="cpu", devices=1, strategy="ddp").strategy
    kinds = (Strategy, SingleDeviceStrategy, ParallelStrategy, DDPStrategy)
    assert [isinstance(default, kind) for kind in kinds] == [True, True, False, False]
    assert [isinstance(several, kind) for kind in kinds] == [True, False, True, True]
    assert issubclass(plain.DDPStrategy, ParallelStrategy)
    mine = type("Mine", (DDPStrategy,), {})
    assert [isinstance(mine(), kind) for kind in (*kinds, mine)] == [True, False, True, True, True]
    assert not isinstance(several, mine)  # a class of the user's is only itself
    assert not isinstance(DDPStrategy(), mine)
    assert isinstance(mine(), plain.DDPStrategy)
    assert not isinstance(3, Strategy)
    assert not isinstance(3, plain.Strategy)


@pytest.mark.parametrize("name", BASES)
def test_a_base_itself_is_a_strategy_and_costs_a_step_nothing(name: str, tmp_path: Path) -> None:
    def calls_per_step(strategy: Any) -> int:
        engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=strategy)
        net, count = nn.Linear(4, 1), Counter[str]()
        model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        batches = iter(engine.setup_dataloaders([torch.ones(2, 4)] * 3))
        for _ in range(2):
            count.clear()
            sys.setprofile(lambda frame, event, argument: count.update([event]))
            try:
                optimizer.zero_grad()
                engine.backward(model(next(batches)).sum())
                optimizer.step()
            finally:
                sys.setprofile(None)
        engine.teardown()
        return count["call"]

    assert calls_per_step(fabric_base(name)()) == calls_per_step(BASES[name]())


def test_constructor_arguments() -> None:
    from lightning.fabric.accelerators import CPUAccelerator
    from lightning.fabric.plugins import HalfPrecision, TorchCheckpointIO
    from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy

    precision, store = HalfPrecision("bf16-true"), TorchCheckpointIO()
    for strategy in (
        SingleDeviceStrategy("cpu", CPUAccelerator(), store, precision),
        DDPStrategy(checkpoint_io=store, precision=precision, find_unused_parameters=True, start_method="spawn"),
    ):
        engine = drivetrain.Engine(accelerator="auto", strategy=strategy)
        assert engine.strategy is strategy
        assert engine.precision is strategy.precision is precision
        assert strategy.checkpoint_io is store
        again = pickle.loads(pickle.dumps(strategy))
        assert type(again) is type(strategy)
    assert strategy.ddp_arguments == {"find_unused_parameters": True}


def test_a_constructor_takes_what_fabrics_takes_and_nothing_else() -> None:
    base = fabric_base("ParallelStrategy")
    names = ["accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision"]
    assert list(inspect.signature(base).parameters) == names
    for arguments in ({"timeout": None}, {"precision_plugin": None}):  # drivetrain's class takes both
        with pytest.raises(TypeError, match=r"ParallelStrategy: got an unexpected keyword argument"):
            base(**arguments)
        plain.ParallelStrategy(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ParallelStrategy: too many positional arguments"):
        base(*[None] * 6)


def test_a_strategy_that_is_registered_is_built_as_fabric_builds_it() -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy

    class Named(SingleDeviceStrategy):
        def __init__(self, more: int) -> None:
            super().__init__()
            self.more = more

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            strategy_registry.register("a_name_of_this_test", cls, description="for a test", more=3)

    try:
        engine = drivetrain.Engine(accelerator="cpu", strategy="a_name_of_this_test", precision="64-true")
        assert isinstance(engine.strategy, Named)
        assert engine.strategy.more == 3
        assert engine.strategy.precision is engine.precision
        assert engine.precision.name == "64-true"
        with pytest.raises(ConfigurationError, match=r"Subclass lightning.pytorch.strategies.SingleDeviceStrategy"):
            drivetrain.Trainer(strategy="a_name_of_this_test")
    finally:
        STRATEGY_REGISTRY.remove("a_name_of_this_test")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [*BASES, "ParallelStrategy"])
def test_a_trainer_says_which_class_to_subclass(base: str) -> None:
    strategy = type("Mine", (fabric_base(base),), {})()
    with pytest.raises(ConfigurationError, match=rf"Mine.*Subclass lightning\.pytorch\.strategies\.{base}\."):
        drivetrain.Trainer(accelerator="cpu", strategy=strategy)
    pl_base = getattr(importlib.import_module("lightning.pytorch.strategies"), base)
    drivetrain.Trainer(accelerator="cpu", devices=1, strategy=type("Mine", (pl_base,), {})())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_override_that_nobody_would_call_is_refused_by_name(name: str) -> None:
    strategy = type("Mine", (fabric_base("DDPStrategy"),), {name: lambda self: None})
    with pytest.raises(ConfigurationError, match=f"Mine overrides {name}, which is never called here") as caught:
        drivetrain.Engine(accelerator="cpu", devices=1, strategy=strategy())
    assert str(caught.value).endswith(REFUSED[name])


@pytest.mark.parametrize("name", ["reduce", "explain", "zero_grad", "_meet"])
def test_a_name_that_means_something_else_here_is_refused(name: str) -> None:
    strategy = type("Mine", (fabric_base("DDPStrategy"),), {name: lambda self: None})
    with pytest.raises(ConfigurationError, match=f"Mine defines {name}, .* Rename it"):
        drivetrain.Engine(accelerator="cpu", devices=1, strategy=strategy())


def test_members_of_ones_own_and_those_of_a_trainer_are_nobodys_business() -> None:
    strategy = type(
        "Mine", (fabric_base("SingleDeviceStrategy"),), {"anything": 3, "setup": lambda self, trainer: None}
    )
    drivetrain.Engine(accelerator="cpu", strategy=strategy()).setup(nn.Linear(1, 1))


def test_each_context_of_fabric_can_decorate_a_function() -> None:
    import lightning as L

    fabric = L.Fabric(strategy=fabric_base("SingleDeviceStrategy")("cpu"))
    model = fabric.setup(nn.Linear(1, 1))
    for context in (fabric.init_module(), fabric.init_tensor(), fabric.no_backward_sync(model)):
        made = context(nn.Linear)
        assert made(1, 2).weight.shape == made(1, 2).weight.shape == (2, 1)


def test_engines_of_deepspeed_after_an_error_in_teardown_are_released_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = []

    class Fails(FabricDeepSpeedStrategy):
        def _let_go(self) -> None:
            if self._engine == "first":
                raise RuntimeError("of DeepSpeed")

    monkeypatch.setattr(plain.DeepSpeedStrategy, "teardown", lambda self: released.append(self._engine))
    strategy: Any = object.__new__(Fails)  # the constructor needs DeepSpeed
    vars(strategy).update(lightning_module=None, _engine=None)
    strategy._all = [_Trained(name, nn.Linear(1, 1), None, None) for name in ("first", "last")]
    with pytest.raises(RuntimeError, match="of DeepSpeed"):
        strategy.teardown()
    strategy.teardown()
    assert released == ["last"]
