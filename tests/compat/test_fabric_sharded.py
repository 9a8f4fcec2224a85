"""``fabric.strategies`` for sharded models, in loops of one's own on one and on two processes."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import strategies as plain
from drivetrain.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.usefixtures("served")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(self.first(x).relu())
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.out(x)
        return result


def of_fabric(name: str) -> Any:
    return getattr(importlib.import_module("lightning.fabric.strategies"), name)


def sharded_over_data(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def split_by_columns(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def untouched(model: nn.Module, mesh: Any) -> nn.Module:
    return model


STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: of_fabric("FSDPStrategy")(auto_wrap_policy={Block}, activation_checkpointing_policy={Block}),
    "fsdp, files": lambda: of_fabric("FSDPStrategy")(state_dict_type="full", sharding_strategy="SHARD_GRAD_OP"),
    "fsdp2": lambda: of_fabric("ModelParallelStrategy")(sharded_over_data, "auto", 1),
    "left to the strategy": lambda: of_fabric("ModelParallelStrategy")(untouched, tensor_parallel_size=1),
    "tensors": lambda: of_fabric("ModelParallelStrategy")(split_by_columns, 1, save_distributed_checkpoint=False),
}


def program(strategy: Any, folder: Path, devices: int, whole_batch: bool = False) -> dict[str, Any]:
    """A loop with accumulated gradients, clipping and a checkpoint; returns what must not depend on the strategy."""
    import lightning as L

    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(fabric.global_rank)  # rank 0's weights count
    with fabric.init_module(empty_init=False):
        net = Net()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.02))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4 if whole_batch else 2))
    losses, norms = [], []

    def epoch() -> None:
        for index, (inputs, targets) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = F.mse_loss(model(inputs), targets)
                fabric.backward(loss / 2)
            losses.append(fabric.all_reduce(loss.detach()))
            if index % 2:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=1.0))
                optimizer.step()
                optimizer.zero_grad()

    epoch()
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    path = folder / "state"
    fabric.save(path, state)
    epoch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.state.clear()
    state["epoch"] = 0
    assert fabric.load(path, state) == {}
    epoch()
    fabric.barrier("here")
    found = {
        "losses": torch.stack(losses), "norms": torch.stack([_whole(each) for each in norms]), "epoch": state["epoch"],
        "folder": path.is_dir(), "weights": {name: _whole(each) for name, each in model.named_parameters()},
        "told": fabric.broadcast(fabric.global_rank, src=devices - 1), "samples": len(loader),
    }  # fmt: skip
    fabric.teardown()
    return found


def _whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result.clone()


def check(found: dict[str, Any], expected: dict[str, Any], devices: int) -> None:
    for name in ("losses", "norms", "weights"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    half = len(found["losses"]) // 3
    torch.testing.assert_close(found["losses"][half : 2 * half], found["losses"][2 * half :])  # the checkpoint is exact
    assert (found["epoch"], found["told"]) == (3, devices - 1)
    assert len(set(found["losses"].tolist())) > half  # the control: it has learnt something


@pytest.mark.parametrize("kind", STRATEGIES)
def test_one_process_trains_as_without_shards(kind: str, tmp_path: Path) -> None:
    found = program(STRATEGIES[kind](), tmp_path, 1)
    check(found, program("auto", tmp_path / "plain", 1), 1)
    assert found["folder"] is (kind not in ("fsdp, files", "tensors"))


def on_two_ranks(kind: str, folder: Path) -> dict[str, Any]:
    from drivetrain import compat

    compat.install()
    try:
        return program(STRATEGIES[kind](), folder / kind, 2)
    finally:
        compat.uninstall()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_two_processes_train_as_one_on_all_samples(pool: Any, kind: str, tmp_path: Path) -> None:
    one, other = pool.run(on_two_ranks, kind, tmp_path, group=False)
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
    splits_samples = kind != "tensors"  # whose ranks see the same samples
    check(one, program("auto", tmp_path, 1, whole_batch=splits_samples), 2)
    assert one["samples"] == (4 if splits_samples else 8)


def gradients(folder: Path) -> list[list[Any]]:
    from drivetrain import compat

    compat.install()
    try:
        found = []
        for kind in ("fsdp", "fsdp2"):
            engine = drivetrain.Engine(accelerator="cpu", devices=2, strategy=STRATEGIES[kind]())
            engine.launch()
            model = engine.setup(Net())
            with engine.no_backward_sync(model):
                engine.backward(model(torch.ones(1, 4)).sum())
            held = [parameter.grad is None for parameter in model.parameters()]
            engine.backward(model(torch.ones(1, 4)).sum())
            found.append([all(held), all(parameter.grad is not None for parameter in model.parameters())])
            engine.teardown()
        return found
    finally:
        compat.uninstall()


def test_without_backward_sync_no_gradient_is_exchanged(pool: Any, tmp_path: Path) -> None:
    assert pool.run(gradients, tmp_path, group=False) == 2 * [2 * [[True, True]]]


# ---- what programs call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_layers_without_memory_are_initialised_after_they_are_sharded(kind: str) -> None:
    engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=STRATEGIES[kind](), precision="64-true")
    engine.launch()
    with engine.init_module(empty_init=True), engine.sharded_model():
        net = Net()
    assert {parameter.device.type for parameter in net.parameters()} == {"meta"}
    model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = [_whole(parameter) for parameter in model.parameters()]
    assert {each.dtype for each in before} == {torch.float64}
    engine.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()  # the optimizer has followed
    after = [_whole(parameter) for parameter in model.parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    engine.teardown()


def test_weights_of_one_process_are_read_into_shards(tmp_path: Path) -> None:
    torch.save((expected := Net()).state_dict(), tmp_path / "raw.pt")
    engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=STRATEGIES["fsdp"]())
    engine.launch()
    model = engine.setup(Net())
    engine.load_raw(tmp_path / "raw.pt", model)
    torch.testing.assert_close({name: _whole(each) for name, each in model.state_dict().items()}, expected.state_dict())
    torch.save({"unknown": torch.ones(1)}, tmp_path / "raw.pt")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.first\.weight"):
        engine.load_raw(tmp_path / "raw.pt", model)
    engine.teardown()


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_states_under_the_names_that_lightnings_files_have(kind: str, tmp_path: Path) -> None:
    def built() -> Any:
        engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=STRATEGIES[kind]())
        engine.launch()
        net = Net()
        reverse = [*net.parameters()][::-1] if loaded else net.parameters()
        return engine, *engine.setup(net, torch.optim.Adam(reverse, lr=0.1))

    loaded: dict[str, Any] = {}
    engine, model, optimizer = built()
    engine.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    expected = {name: _whole(optimizer.state[each]["exp_avg"]) for name, each in model.named_parameters()}
    moments = {
        name: {key: _whole(value) for key, value in optimizer.state[each].items()}
        for name, each in model.named_parameters()
    }
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    loaded = {
        "model": {name: _whole(each) for name, each in model.state_dict().items()},
        "optimizer": {"state": moments, "param_groups": [{**group, "params": names}]},
    }
    torch.save(loaded, tmp_path / "x.ckpt")
    engine.teardown()
    engine, model, optimizer = built()  # with the parameters in another order
    assert engine.load(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer}) == {}
    found = {name: _whole(optimizer.state[each]["exp_avg"]) for name, each in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    del loaded["optimizer"]["state"]["out.bias"], loaded["optimizer"]["param_groups"][0]["params"][-1]
    torch.save(loaded, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="optimizer"):  # the control: a name is missing
        engine.load(tmp_path / "x.ckpt", {"optimizer": optimizer})
    engine.teardown()


def test_a_folder_of_lightnings_is_refused_with_the_way_to_read_it(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=STRATEGIES["fsdp"]())
    engine.launch()
    model = engine.setup(Net())
    with pytest.raises(CheckpointError, match=r"Run python -m lightning\.fabric\.utilities\.consolidate_checkpoint"):
        engine.load(tmp_path, {"model": model})
    engine.teardown()


def test_a_file_of_some_weights_only(tmp_path: Path) -> None:
    engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=STRATEGIES["fsdp, files"]())
    engine.launch()
    model = engine.setup(Net())
    engine.save(tmp_path / "x.ckpt", {"model": model}, filter={"model": lambda name, value: name.startswith("out")})
    assert set(torch.load(tmp_path / "x.ckpt")["model"]) == {"out.weight", "out.bias"}
    engine.teardown()


def test_constructor_arguments_and_what_can_be_read() -> None:
    from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy, mixed = ModuleWrapPolicy({Block}), MixedPrecision(torch.bfloat16, torch.float32)
    strategy = of_fabric("FSDPStrategy")(
        cpu_offload=True, mixed_precision=mixed, auto_wrap_policy=policy, sharding_strategy="SHARD_GRAD_OP"
    )
    assert strategy.cpu_offload == CPUOffload(offload_params=True)
    assert strategy.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert strategy.mixed_precision is strategy.mixed_precision_config is mixed
    assert strategy.options.mixed_precision.param_dtype is torch.bfloat16
    assert strategy.saves_shards
    assert not of_fabric("FSDPStrategy")(state_dict_type="full").saves_shards
    with pytest.warns(UserWarning, match="ignores limit_all_gathers"):
        of_fabric("FSDPStrategy")(limit_all_gathers=True)
    with pytest.raises(ConfigurationError, match="no argument auto_wrap="):
        of_fabric("FSDPStrategy")(auto_wrap={Block})


def test_hybrid_sharding_on_one_machine_is_full_sharding() -> None:
    from torch.distributed.fsdp import ShardingStrategy

    strategy = of_fabric("FSDPStrategy")(auto_wrap_policy={Block}, sharding_strategy="HYBRID_SHARD")
    assert strategy.sharding_strategy is ShardingStrategy.HYBRID_SHARD
    assert strategy._fsdp_kwargs == {"use_orig_params": True, "auto_wrap_policy": {Block}}
    engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=strategy)
    engine.launch()
    model = engine.setup(Net())
    assert (strategy.device_mesh.ndim, strategy.sharding_strategy) == (1, ShardingStrategy.HYBRID_SHARD)
    assert model(torch.ones(1, 4)).shape == (1, 1)
    engine.teardown()


@pytest.mark.parametrize("policy", [None, {Block}])
def test_layers_that_the_program_wraps_are_the_blocks(policy: Any) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import wrap

    engine = drivetrain.Engine(
        accelerator="cpu", devices=1, strategy=of_fabric("FSDPStrategy")(auto_wrap_policy=policy)
    )
    engine.launch()
    for context in (engine.sharded_model(), engine.init_module()):
        with context:
            net = Net()
            net.blocks[0].first = wrap(net.blocks[0].first)
        if policy is None:
            engine.setup(net)
        else:
            with pytest.warns(UserWarning, match="also wrapped layers itself"):
                engine.setup(net)
        found = [name for name, module in net.named_modules() if isinstance(module, FSDPModule)]
        assert found == ["", "blocks.0.first"]
    engine.teardown()


def test_a_function_that_returns_no_module() -> None:
    strategy = of_fabric("ModelParallelStrategy")(lambda model, mesh: None)
    engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=strategy)
    engine.launch()
    with pytest.raises(TypeError, match="the function returned None"):
        engine.setup(Net())
    engine.teardown()


def test_there_is_no_mesh_before_the_processes_have_met() -> None:
    strategy = STRATEGIES["fsdp2"]()
    drivetrain.Engine(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(ConfigurationError, match=r"are not connected yet\. Call engine\.launch"):
        _ = strategy.device_mesh


def test_a_compiled_module_keeps_its_names() -> None:
    def compiled(model: nn.Module, mesh: Any) -> Any:
        asked.append(mesh.mesh_dim_names)
        return torch.compile(model, backend="eager")

    asked: list[Any] = []
    engine = drivetrain.Engine(accelerator="cpu", devices=1, strategy=of_fabric("ModelParallelStrategy")(compiled))
    engine.launch()
    model = engine.setup(Net())
    assert set(model.state_dict()) == set(Net().state_dict())
    assert asked == [("data_parallel", "tensor_parallel")]
    engine.teardown()


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_names_and_instances(name: str) -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy

    module = {"FSDPStrategy": "fsdp", "ModelParallelStrategy": "model_parallel"}[name]
    cls = of_fabric(name)
    assert getattr(importlib.import_module(f"lightning_fabric.strategies.{module}"), name) is cls
    assert {"fsdp", "fsdp_cpu_offload"} <= set(STRATEGY_REGISTRY) == set(STRATEGY_REGISTRY.available_strategies())
    own = drivetrain.Engine(accelerator="cpu", devices=1, strategy="fsdp").strategy
    assert isinstance(own, cls) is (name == "FSDPStrategy")  # what Fabric(strategy="fsdp") uses
    assert issubclass(cls, (ParallelStrategy, plain.FSDPStrategy))
    with pytest.raises(ConfigurationError, match=rf"Subclass lightning\.pytorch\.strategies\.{name}\."):
        drivetrain.Trainer(accelerator="cpu", devices=1, strategy=STRATEGIES["fsdp" if "FSDP" in name else "fsdp2"]())


def test_a_subclass_is_called_with_fabrics_signatures(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()

    class Mine(of_fabric("FSDPStrategy")):  # type: ignore[misc]
        def setup_module(self, module: nn.Module) -> nn.Module:
            calls["setup_module"] += 1
            return super().setup_module(module)

        def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
            calls["save_checkpoint"] += 1
            super().save_checkpoint(path, state, storage_options, filter)

        def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
            calls["load_checkpoint"] += 1
            return super().load_checkpoint(path, state, strict, weights_only)

    check(program(Mine(auto_wrap_policy={Block}), tmp_path, 1), program("auto", tmp_path / "plain", 1), 1)
    assert calls == {"setup_module": 1, "save_checkpoint": 1, "load_checkpoint": 1}
