"""The strategies for XLA devices: their rules, on a stand-in of torch_xla. tests/xla has the real one."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Trainer
from drivetrain.accelerators import CPUAccelerator
from drivetrain.checkpoints import TorchCheckpointIO, XLACheckpointIO
from drivetrain.clusters import XLAEnvironment
from drivetrain.errors import ConfigurationError, NotSupportedError
from drivetrain.launchers import ExternalLauncher, LauncherRegistry, XLALauncher
from drivetrain.plan import resolve
from drivetrain.precision import HalfPrecision, XLAPrecision
from drivetrain.settings import Settings
from drivetrain.strategies import (
    DDPStrategy,
    SingleDeviceXLAStrategy,
    StrategyRegistry,
    XLASPMDStrategy,
    XLAStrategy,
)
from drivetrain.strategies.xla import XLAGroup, on_device
from drivetrain.strategies.xla_spmd import largest_divisible
from drivetrain.testing._regression import Small, plain_loop

HERE = Path(__file__).parent
BOTH = pytest.mark.parametrize("cls", [XLAStrategy, SingleDeviceXLAStrategy])


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in as torch_xla in this process, with one replica."""
    spec = importlib.util.spec_from_file_location("torch_xla_standin", HERE / "torch_xla_standin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, each in module.modules().items():
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    on_device.__globals__["_device_loader"].cache_clear()
    yield module
    on_device.__globals__["_device_loader"].cache_clear()


def launched(standin: Any, **arguments: Any) -> XLAStrategy:
    """A strategy whose one replica runs here."""
    strategy = XLAStrategy(accelerator=CPUAccelerator(), parallel_devices=[torch.device("cpu")], **arguments)
    strategy.setup_environment()
    return strategy


# ---- the constructor -------------------------------------------------------------------------------------------------


@BOTH
def test_s4_1_without_torch_xla_the_class_is_there_and_an_instance_is_not(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.strategies._xla.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=f"{cls.__name__} needs the package torch_xla.* Write pip install"):
        cls()


def test_s4_1_it_brings_its_environment_its_store_and_its_launcher(standin: Any) -> None:
    strategy = XLAStrategy()
    assert isinstance(strategy, DDPStrategy)
    assert type(strategy.cluster_environment) is XLAEnvironment
    assert type(strategy.checkpoint_io) is XLACheckpointIO
    assert type(SingleDeviceXLAStrategy().checkpoint_io) is XLACheckpointIO
    assert strategy.facts.start_method == "xla"
    assert (strategy.debug, strategy.sync_module_states) == (False, True)
    own = TorchCheckpointIO()
    assert XLAStrategy(checkpoint_io=own).checkpoint_io is own
    assert XLAStrategy(precision_plugin=XLAPrecision("bf16-true")).own_parts.precision.name == "bf16-true"  # type: ignore[union-attr]
    assert list(inspect.signature(XLAStrategy).parameters)[:6] == [
        "accelerator", "parallel_devices", "checkpoint_io", "precision_plugin", "debug", "sync_module_states"
    ]  # fmt: skip


@BOTH
def test_s4_1_another_kind_of_object_is_a_type_error(cls: Any, standin: Any) -> None:
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(checkpoint_io='here'\): pass a CheckpointIO"):
        cls(checkpoint_io="here")
    with pytest.raises(TypeError, match=rf"{cls.__name__}\(precision_plugin='bf16-true'\): pass a Precision"):
        cls(precision_plugin="bf16-true")


@BOTH
def test_s4_1_arguments_that_nobody_knows_are_refused_by_name(cls: Any, standin: Any) -> None:
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no argument debgu=True. Did you mean 'debug'"):
        cls(debgu=True)


def test_s4_2_before_the_replicas_run(standin: Any) -> None:
    strategy = XLAStrategy()
    ranks = (strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size)
    assert ranks == (0, 0, 0, 1)
    with pytest.raises(RuntimeError, match="root_device is unknown before the replicas run"):
        _ = strategy.root_device
    assert strategy.barrier() is None  # type: ignore[func-returns-value]
    tensor = torch.ones(2)
    assert strategy.all_gather(tensor) is tensor
    assert strategy.broadcast([1]) == [1]
    assert standin.CALLS == []
    strategy.teardown()


def test_s4_3_ranks_are_known_when_the_environment_is_set_up(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = launched(standin)
    assert standin.CALLS == [("spawn", 1, "spawn")]  # torch_xla makes this process one for a single device
    assert strategy.root_device == torch.device("cpu")
    assert type(strategy.world) is XLAGroup
    strategy.set_ranks(XLAEnvironment(), 1)  # of another job
    with pytest.raises(RuntimeError):
        _ = strategy.root_device
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE=2 says that a launcher has started several"):
        strategy.setup_environment()


def test_s4_8_a_job_of_one_replica_stacks_as_one_of_several(standin: Any) -> None:
    strategy = launched(standin)
    assert strategy.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]]
    assert strategy.all_gather(torch.tensor(3)).tolist() == [3]
    weight = torch.ones(2, requires_grad=True)
    (strategy.all_gather(weight, sync_grads=True) * 3).sum().backward()
    assert weight.grad.tolist() == [3.0, 3.0]
    assert not strategy.all_gather(weight).requires_grad
    assert strategy.reduce(torch.tensor(2.0)) == 2.0
    assert strategy.reduce(output=torch.tensor(2.0)) == 2.0
    assert strategy.reduce(tensor=torch.tensor(2.0), reduce_op="sum") == 2.0


def test_s4_6_a_loader_is_wrapped_once_and_keeps_what_tells_where_it_is(standin: Any) -> None:
    strategy = launched(standin)
    for workers in (0, 1):
        loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=workers)
        wrapped = strategy.process_dataloader(loader)
        assert isinstance(wrapped, standin.MpDeviceLoader)
        assert strategy.process_dataloader(wrapped) is wrapped
        assert (wrapped.dataset, wrapped.batch_sampler) == (loader.dataset, loader.batch_sampler)
        assert len(wrapped) == 3
        standin.CALLS.clear()
        for _ in range(2):
            assert [batch[0].tolist() for batch in wrapped] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        assert standin.CALLS.count(("upload",)) == 6
        assert standin.CALLS.count(("parallel loader", ["cpu"])) == 2 * workers  # threads upload ahead
        assert standin.CALLS.count(("sync",)) >= 6
    assert list(on_device([], torch.device("cpu"))) == []
    strategy.teardown()
    assert ("parallel loader closed",) in standin.CALLS


def test_s4_12_every_rank_runs_what_was_recorded_and_options_reach_the_store(standin: Any, tmp_path: Path) -> None:
    asked: list[Any] = []

    class Store(XLACheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            asked.append(storage_options)
            super().save_checkpoint(checkpoint, path)

    strategy = launched(standin, checkpoint_io=Store())
    standin.CALLS.clear()
    strategy.save_checkpoint({"a": torch.ones(1)}, tmp_path / "a.ckpt", storage_options={"token": 1})
    assert standin.CALLS[0] == ("sync",)
    assert asked == [{"token": 1}]
    strategy.global_rank = 1
    strategy.save_checkpoint({"a": 1}, tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists()
    with pytest.raises(TypeError, match="takes no storage_options"):
        launched(standin).save_checkpoint({"a": 1}, tmp_path / "c.ckpt", storage_options={"token": 1})


def test_s4_12_the_store_writes_plain_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        """What omegaconf's containers are to the store."""

    fake: Any = type(sys)("omegaconf")
    fake.Container = Node
    fake.OmegaConf = type("OmegaConf", (), {"to_container": staticmethod(lambda node, resolve: {"lr": resolve})})
    monkeypatch.setitem(sys.modules, "omegaconf", fake)
    XLACheckpointIO().save_checkpoint(
        {"hparams": {"own": Node(), "all": [Node(), 1]}, "t": torch.ones(2)}, tmp_path / "a"
    )
    read = torch.load(tmp_path / "a", weights_only=True)
    assert read["hparams"] == {"own": {"lr": True}, "all": [{"lr": True}, 1]}


@pytest.mark.parametrize("local_rank", [0, 1])
def test_s4_13_the_first_rank_of_every_machine_removes(standin: Any, tmp_path: Path, local_rank: int) -> None:
    strategy = launched(standin)
    (tmp_path / "a.ckpt").touch()
    strategy.local_rank, strategy.global_rank = local_rank, 8 + local_rank
    strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists() is (local_rank == 1)


def test_s4_14_teardown_leaves_the_environment_clean(standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PT_XLA_DEBUG", raising=False)
    strategy = launched(standin, debug=True)
    strategy.connect(nn.Linear(2, 2))
    strategy.setup(None)
    assert os.environ["PT_XLA_DEBUG"] == "1"
    strategy.teardown()
    assert "PT_XLA_DEBUG" not in os.environ
    strategy.teardown()


def test_s4_5_the_module_is_not_wrapped(standin: Any) -> None:
    strategy = launched(standin)
    module = nn.Linear(2, 2)
    strategy.connect(module)
    strategy.setup(None)
    assert strategy.model is strategy.lightning_module is module


def test_s4_15_the_names(standin: Any) -> None:
    assert {"xla", "xla_debug", "single_xla", "xla_spmd", "xla_spmd_full"} <= set(StrategyRegistry.available())
    assert StrategyRegistry.get("xla_debug").debug  # type: ignore[attr-defined]
    assert type(StrategyRegistry.get("single_xla")) is SingleDeviceXLAStrategy
    assert not any("xla" in name for name in StrategyRegistry.available() if name.startswith("ddp"))
    for name, given in (("xla", XLAStrategy()), ("single_xla", SingleDeviceXLAStrategy())):
        for strategy in (name, given):
            with pytest.raises(ConfigurationError, match=r'Strategy works on the accelerator "xla" only'):
                resolve(Settings(accelerator="cpu", devices=1, strategy=strategy))


def test_s4_16_one_device_launches_nothing_and_several_go_through_torch_xla(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Trainer(accelerator="xla", devices=1, strategy="xla", logger=False).plan.start_method is None
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    plan = resolve(Settings(accelerator="xla", devices=2, strategy="xla"))
    assert plan.start_method == "xla"
    assert LauncherRegistry.entry("xla").cls is XLALauncher
    assert XLALauncher.leaves_one_here
    launcher = XLALauncher(plan.environment, 2)
    standin.Replica.started = True
    with pytest.raises(ConfigurationError, match="runtime has started in this process"):
        launcher.launch(print)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="Start the program once on each machine"):
        launcher.launch(print)
    assert ExternalLauncher.is_external


def test_a_backward_pass_that_came_before_the_runtime_is_explained(standin: Any) -> None:
    strategy = SingleDeviceXLAStrategy()
    error = RuntimeError("0 <= device.index() && device.index() < device_ready_queues_.size() INTERNAL ASSERT FAILED")
    assert "Begin the program with import torch_xla and torch_xla.device()" in str(strategy.explain(error))
    assert strategy.explain(RuntimeError("another")) is None


def test_spmd_refuses_a_sharding_that_there_is_not(standin: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"sharding='ful'\) is unknown. Did you mean 'full'"):
        XLASPMDStrategy(sharding="ful")  # type: ignore[arg-type]
    assert StrategyRegistry.get("xla_spmd_full").sharding == "full"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shape", "dimension"), [((8, 4), 0), ((4, 8), 1), ((8, 8), 0), ((3, 8), 1), ((3,), None), ((), None), ((0, 4), 1)]
)
def test_spmd_shards_the_largest_dimension_that_divides(shape: tuple[int, ...], dimension: int | None) -> None:
    assert largest_divisible(shape, 4) == dimension


def test_groups_of_some_replicas_are_refused(standin: Any) -> None:
    group = XLAGroup(torch.device("cpu"))
    assert group.new([0]) is group
    with pytest.raises(NotSupportedError, match="exchange all together"):
        group.new([0, 1])


def test_the_environment_asks_the_runtime(standin: Any) -> None:
    environment = XLAEnvironment()
    ranks = (environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank())
    assert ranks == (1, 0, 0, 0)
    environment.set_world_size(5)
    environment.set_global_rank(5)
    assert environment.world_size() == 1
    assert not environment.creates_processes_externally
    assert XLAEnvironment.detect({"PJRT_DEVICE": "TPU"})
    assert not XLAEnvironment.detect({})


@pytest.mark.parametrize("name", ["32-true", "16-true", "bf16-true"])
def test_the_precision_is_that_of_its_name(name: str) -> None:
    precision = XLAPrecision(name)
    module = precision.convert_module(nn.Linear(2, 2))
    expected = torch.float32 if name == "32-true" else HalfPrecision(name).dtype
    assert module.weight.dtype is precision.convert_input(torch.ones(2, dtype=torch.float64)).dtype is expected
    assert (precision.forward_context() is None) is (name == "32-true")
    with pytest.raises(ConfigurationError, match="there is no such precision on XLA devices"):
        XLAPrecision("64-true")


# ---- two replicas ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program beside this file has found, and the folder in which it ran."""
    folder = tmp_path_factory.mktemp("replicas")
    done = programs.run("-W", "error", HERE / "xla_program.py", folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "results.pt", weights_only=False)
    found["seen"], found["folder"] = torch.load(folder / "seen.pt"), folder
    return found


def near(found: Any, tolerance: float = 1e-9, **arguments: Any) -> None:
    expected = plain_loop(lambda kind: Small(kind).to(torch.float64), **arguments)["weights"]
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=tolerance, atol=tolerance)


def test_s4_3_each_replica_knows_its_rank(job: Any) -> None:
    for rank, found in enumerate(job["exchanged"]):
        assert found["ranks"] == (rank, rank, 0, 2)
        assert found["variables"] == [str(rank), str(rank), "2"]
        assert found["environment"] == "XLAEnvironment"


def test_s4_4_replicas_begin_with_the_weights_of_rank_0_and_tied_ones_stay_tied(job: Any) -> None:
    assert [seen["equal at start"] for seen in job["seen"]] == [True, True]
    assert [found["tied"] for found in job["exchanged"]] == [True, True]
    assert [seen["debug"] for seen in job["seen"]] == ["1", "1"]
    assert job["debug after"] is None


def test_s4_5_s4_6_module_and_loader_in_a_replica(job: Any) -> None:
    for seen in job["seen"]:
        assert not seen["wrapped"]
        assert seen["loader"] == ["DeviceLoader", True]
        assert seen["loader has"] == [True, True]


def test_s4_7_gradients_are_averaged(job: Any) -> None:
    near(job["fit"])
    near(job["accumulated"], accumulate=4, clip=("norm", 0.05))


def test_s4_7_it_resumes_in_32_bits_from_a_file_that_one_process_on_the_host_wrote(job: Any) -> None:
    near(job["resumed"], tolerance=1e-5)


def test_s4_8_all_gather_stacks_and_gradients_flow_back(job: Any) -> None:
    for rank, found in enumerate(job["exchanged"]):
        assert found["gathered"].tolist() == [[1.0, 2.0], [2.0, 2.0]]
        # rank r multiplies its slice of everyone's by (r + 1): 1 + 2 in all
        assert found["gradient"].tolist() == [[3.0, 30.0], [300.0, 3000.0]][rank]
        assert found["gathered scalar"].tolist() == [0.0, 1.0]
        assert found["gathered flags"].tolist() == [[False, True], [True, True]]
        assert found["gathered, with a group"].tolist() == [[0], [1]]
        assert "takes tensors, and got a list" in found["gathered list"]


def test_s4_9_barrier_is_a_rendezvous_of_all(job: Any) -> None:
    for found in job["exchanged"]:
        assert found["barrier"] == (True, True)
        assert found["rendezvous"] == [("rendezvous", "a name")]


def test_s4_10_broadcast_keeps_shapes_and_honours_src(job: Any) -> None:
    for found in job["exchanged"]:
        assert found["broadcast object"] == {"rank": 1, "weights": torch.tensor([1])}
        assert found["broadcast tensor"].tolist() == [[7.0]]  # NaN elsewhere does not matter
        assert found["broadcast scalar"].shape == ()
        assert found["broadcast scalar"] == 3
        assert found["broadcast flags"].tolist() == [True, True]
        assert found["broadcast to others"].tolist() == [2.5]


def test_s4_11_reduce_averages_unless_told_otherwise(job: Any) -> None:
    for found in job["exchanged"]:
        for name in ("default", "None", "avg", "group"):
            assert found[f"reduced, {name}"].tolist() == [1.5, 4.0]
        for name in ("sum", "SUM"):
            assert found[f"reduced, {name}"].tolist() == [3.0, 8.0]
        assert found["reduced, max"].tolist() == [2.0, 4.0]
        assert found["reduced ints"].tolist() == [1.5]
        assert found["reduced text"] == "text"
        assert found["keyed"].tolist() == [[1.0, 0.0], [1.0, 1.0]]
        assert found["decisions"] == [False, True]


def test_s4_12_s4_13_rank_0_writes_and_removes(job: Any) -> None:
    marks = {path.name for path in job["folder"].iterdir() if path.name.endswith((".ckpt-0", ".ckpt-1"))}
    assert marks == {"wrote-epoch-0.ckpt-0", "wrote-epoch-1.ckpt-0", "removed-epoch-1.ckpt-0"}
    assert (job["folder"] / "epoch-0.ckpt").exists()
    assert not (job["folder"] / "epoch-1.ckpt").exists()


def test_s4_16_the_same_trainer_launches_again_and_rank_0s_result_comes_back(job: Any) -> None:
    assert set(job["validated"][0]) == {"loss"}
    assert job["spawned"] == [("spawn", None, "fork")] * len(job["spawned"])
    assert len(job["spawned"]) == 6


def test_s4_16_a_replica_that_fails_ends_the_others(job: Any) -> None:
    message, cause, soon = job["failure"]
    assert message.startswith("Replica 1 of this machine's 2 raised ZeroDivisionError: on purpose")
    assert cause == "ZeroDivisionError"
    assert soon
