"""What users of other trainers report about sharded models, their states and their gradients, each as a test."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import Saves, near, on_two_dimensions, same, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer
from drivetrain.base.tree import map_leaves
from drivetrain.checkpoints import TorchCheckpointIO, sharded
from drivetrain.strategies import FSDPStrategy
from drivetrain.strategies.sharded_state import is_dtensor, shard_like

LONG = os.environ.get("DRIVETRAIN_FAULTS", "") == "long"
KINDS = ("full", "sharded")
SHARDED = KINDS if LONG else ("sharded",)


def data(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(4, 6)
        self.blocks = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
        self.head = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.blocks(self.before(batch[0])))), batch[1])

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=0.05)


def trainer(kind: str, ranks: int = 2, options: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    strategy: Any = kind if kind == "single_device" else FSDPStrategy(state_dict_type=kind, **(options or {}))  # type: ignore[arg-type]
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "max_epochs": 2, "precision": "64-true", "devices": ranks, "strategy": strategy,
        "split_batches": ranks > 1,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def loader() -> Any:
    return DataLoader(data(), batch_size=8)


def fit(module: LightningModule, ours: Trainer, path: Path | None = None) -> dict[str, Any]:
    ours.fit(module, loader(), ckpt_path=path)
    return state_of(module, ours)


def state_of(module: LightningModule, ours: Trainer) -> dict[str, Any]:
    return {
        "weights": {name: whole(value).detach().clone() for name, value in module.state_dict().items()},
        "optimizer": map_leaves(whole, ours.optimizers[0].state_dict()["state"]),
        "steps": ours.global_step,
    }


# ---- precision, compiled blocks --------------------------------------------------------------------------------------


class BySGD(Net):
    """Adam divides by numbers that are zero in 16 bits."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)


def in_precision(precision: str, folder: Path) -> Any:
    found = []
    for path in (None, folder / "one.ckpt"):
        saves = [] if path else [Saves(folder / "one.ckpt", 4)]
        found.append(fit(BySGD(), trainer("sharded", precision=precision, callbacks=saves), path))
    return found


@pytest.mark.parametrize(
    "precision", ["16-mixed", "bf16-mixed", "bf16-true", "16-true"] if LONG else ["16-mixed", "bf16-true"]
)
def test_every_precision_trains_sharded_and_resumes_exactly(pool: Any, tmp_path: Path, precision: str) -> None:
    for uninterrupted, resumed in pool.run(in_precision, precision, tmp_path, group=False):
        same(resumed, uninterrupted)


class Compiled(Net):
    """Its blocks are compiled in place, or wrapped by ``torch.compile``."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        for index, block in enumerate(self.blocks):
            if wrapped:
                self.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
            else:
                block.compile(backend="eager")


def compiled(wrapped: bool, folder: Path) -> Any:
    module, ours = Compiled(wrapped), trainer("sharded", max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, ours)
        ours.save_checkpoint(folder / "one.ckpt")
        again = fit(Compiled(wrapped), trainer("full"), folder / "one.ckpt")
    plain = fit(Net(), trainer("full"), folder / "one.ckpt")
    return plain, [value.clone() for value in again["weights"].values()]


@pytest.mark.parametrize("wrapped", [False, True], ids=["in place", "wrapped"])
def test_a_checkpoint_of_compiled_blocks_has_the_names_of_plain_ones(pool: Any, tmp_path: Path, wrapped: bool) -> None:
    """No _orig_mod in it: it loads with compiled blocks and without."""
    expected = fit(Net(), trainer("single_device", 1))
    for plain, again in pool.run(compiled, wrapped, tmp_path, group=False):
        near(plain, expected)
        near(again, list(expected["weights"].values()))
    names = json.loads((tmp_path / "one.ckpt" / "manifest.json").read_text())["tensors"]
    assert not [name for name in names if "_orig_mod" in name]


# ---- averages of parameters ------------------------------------------------------------------------------------------


class Average(Callback):
    """Keeps this rank's shards of an exponential moving average of the parameters, and never swaps them in."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in pl_module.named_parameters():
            if name not in self.means:
                self.means[name] = parameter.detach().clone()
            self.means[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.means)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, value in getattr(self, "loaded", {}).items():
            self.means[name] = shard_like(value, dict(pl_module.named_parameters())[name]).clone()


def averaged(kind: str, ranks: int, path: Path, resumes: bool) -> dict[str, Tensor]:
    average = Average()
    ours = trainer(kind, ranks, callbacks=[average], max_epochs=2 if resumes else 1)
    ours.fit(Net(), loader(), ckpt_path=path if resumes else None)
    if not resumes:
        ours.save_checkpoint(path)
    if kind != "single_device":
        assert all(is_dtensor(mean) for mean in average.means.values())
    return {name: whole(mean).clone() for name, mean in average.means.items()}


@pytest.mark.parametrize("kind", SHARDED)
def test_an_average_of_the_local_shards_is_saved_whole_and_resumed_on_other_ranks(
    pool: Any, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "one.ckpt"
    averaged("single_device", 1, tmp_path / "alone.ckpt", False)
    expected = averaged("single_device", 1, tmp_path / "alone.ckpt", True)
    pool.run(averaged, kind, 2, path, False, group=False)
    for found in pool.run(averaged, kind, 3, path, True, world_size=3, group=False):
        near(found, expected)
    near(averaged("single_device", 1, path, True), expected)
    stored = TorchCheckpointIO().load_checkpoint(path)
    assert stored["callbacks"]["Average"]["before.weight"].shape == (6, 4)
    assert not torch.equal(stored["callbacks"]["Average"]["before.weight"], stored["state_dict"]["before.weight"])


# ---- frozen weights --------------------------------------------------------------------------------------------------


class Adapted(Net):
    """Only ``head`` is trained, and only it is saved; the others come from somewhere else."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.before.requires_grad_(False)
        self.blocks.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if name.startswith("head.")}


def adapted(kind: str, path: Path) -> Any:
    ours = trainer(kind, max_epochs=1)
    fit(Adapted(), ours)
    ours.save_checkpoint(path)
    return fit(Adapted(), trainer(kind), path)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_can_be_left_out_of_a_checkpoint_and_it_resumes(pool: Any, tmp_path: Path, kind: str) -> None:
    expected = fit(Adapted(), trainer("single_device", 1))
    for found in pool.run(adapted, kind, tmp_path / "one.ckpt", group=False):
        near(found, expected)
    stored = TorchCheckpointIO().load_checkpoint(tmp_path / "one.ckpt")
    assert sorted(stored["state_dict"]) == ["head.bias", "head.weight"]
    assert [len(each["state"]) for each in stored["optimizer_states"]] == [2]


class FrozenLater(Net):
    """``before`` is trained in the first epoch, frozen in the second, and trained again in the third."""

    def on_train_epoch_start(self) -> None:
        self.before.requires_grad_(self.current_epoch != 1)


def frozen_later(kind: str, path: Path) -> Any:
    ours = trainer(kind, max_epochs=2)
    fit(FrozenLater(), ours)
    ours.save_checkpoint(path)
    return fit(FrozenLater(), trainer(kind, max_epochs=3), path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizers_state_of_a_parameter_that_is_frozen_now_is_kept(pool: Any, tmp_path: Path, kind: str) -> None:
    """pytorch#192202: torch's own function for this drops it in silence."""
    expected = fit(FrozenLater(), trainer("single_device", 1, max_epochs=3))
    for found in pool.run(frozen_later, kind, tmp_path / "one.ckpt", group=False):
        near(found, expected)
    stored = TorchCheckpointIO().load_checkpoint(tmp_path / "one.ckpt")
    assert float(stored["optimizer_states"][0]["state"][0]["step"]) == 3  # three batches of the first epoch
    assert float(stored["optimizer_states"][0]["state"][0]["exp_avg"].abs().sum()) > 0


def forgets() -> bool:
    """Whether torch's functions bring the state of a frozen parameter into a new optimizer."""
    from torch.distributed.checkpoint import state_dict as by_torch

    module, ours = FrozenLater(), trainer("sharded", max_epochs=2)
    fit(module, ours)
    module.before.requires_grad_(False)
    options = by_torch.StateDictOptions(flatten_optimizer_state_dict=True)
    state = by_torch.get_optimizer_state_dict(module, ours.optimizers[0], options=options)
    module.zero_grad()
    fresh = torch.optim.Adam(module.parameters(), lr=0.05)
    by_torch.set_optimizer_state_dict(module, fresh, state, options=options)
    assert fresh.state[module.head.weight]
    return not fresh.state.get(module.before.weight)


def test_torchs_own_functions_drop_it(pool: Any) -> None:
    """The control."""
    assert pool.run(forgets, group=False) == [True, True]


# ---- large states ----------------------------------------------------------------------------------------------------


def without_gathering(folder: Path) -> bool:
    from torch.distributed.tensor import DTensor

    module, ours = Net(), trainer("sharded", max_epochs=1)
    fit(module, ours)

    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("a whole tensor was gathered")

    original = DTensor.full_tensor, DTensor.redistribute
    DTensor.full_tensor = DTensor.redistribute = refuses  # type: ignore[method-assign,assignment]
    try:
        ours.save_checkpoint(folder / "one.ckpt")
        ours.strategy.barrier()
        resumed = trainer("sharded")
        resumed.fit(Net(), loader(), ckpt_path=folder / "one.ckpt")
        with pytest.raises(AssertionError, match="gathered"):  # the control
            whole(module.head.weight)
    finally:
        DTensor.full_tensor, DTensor.redistribute = original  # type: ignore[method-assign]
    return resumed.global_step == 6


def test_saving_and_loading_a_folder_gathers_no_tensor(pool: Any, tmp_path: Path) -> None:
    assert pool.run(without_gathering, tmp_path, group=False) == [True, True]


def saved(kind: str, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    ours = trainer(kind, max_epochs=1, options=options)
    found = fit(Net(), ours)
    ours.save_checkpoint(path)
    return found


def read_own(path: Path) -> int:
    """How many bytes of tensors this rank reads to resume."""
    total = 0
    original = sharded.StoredTensor._read

    def counted(self: Any, piece: Any) -> Tensor:
        nonlocal total
        read = original(self, piece)
        total += read.nbytes if self.called.startswith(("model.", "optimizers.")) else 0
        return read

    sharded.StoredTensor._read = counted  # type: ignore[method-assign]
    try:
        fit(Net(), trainer("sharded"), path)
    finally:
        sharded.StoredTensor._read = original  # type: ignore[method-assign]
    return total


def test_each_process_reads_its_own_shards_only(pool: Any, tmp_path: Path) -> None:
    state = pool.run(saved, "sharded", tmp_path / "one.ckpt", {}, group=False)[0]
    everything = 3 * sum(value.nbytes for value in state["weights"].values())  # weights and two moments
    for read in pool.run(read_own, tmp_path / "one.ckpt", group=False):
        assert 0 < read < 0.6 * everything


def test_a_folder_is_made_a_file_without_the_processes_that_wrote_it(pool: Any, tmp_path: Path) -> None:
    pool.run(saved, "sharded", tmp_path / "one.ckpt", {}, group=False)
    store = TorchCheckpointIO()
    store.save_checkpoint(store.load_checkpoint(tmp_path / "one.ckpt"), tmp_path / "whole.ckpt")
    assert torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]["before.weight"].shape == (6, 4)
    near(fit(Net(), trainer("single_device", 1), tmp_path / "whole.ckpt"), fit(Net(), trainer("single_device", 1)))


# ---- shards of every kind --------------------------------------------------------------------------------------------


def by_columns(parameter: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None


def by_columns_twice(kind: str, path: Path) -> Any:
    saved(kind, path, {"shard_placement_fn": by_columns})
    by_rows = fit(Net(), trainer(kind), path)
    again = fit(Net(), trainer(kind, options={"shard_placement_fn": by_columns}), path)
    return by_rows, again


@pytest.mark.parametrize("kind", SHARDED)
def test_shards_of_columns_are_resumed_as_rows_and_as_columns(pool: Any, tmp_path: Path, kind: str) -> None:
    expected = fit(Net(), trainer("single_device", 1))
    for by_rows, again in pool.run(by_columns_twice, kind, tmp_path / "one.ckpt", group=False):
        near(by_rows, expected)
        near(again, expected)


def strided(path: Path) -> tuple[Tensor, list[str]]:
    """Rows that two ranks of tensor parallelism share out, and then two of FSDP: a rank's rows are not neighbours."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from drivetrain.strategies.sharded_files import save

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = nn.Linear(3, 9, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(27).reshape(9, 3))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tensor"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["data"])
    ours = trainer("sharded", 4)
    ours.strategy.setup_environment()
    save(ours.strategy, {"state_dict": {"weight": layer.weight.detach()}}, path)
    expected = layer.weight.detach().full_tensor()
    found = sharded.read(path, lazy=("model.",))["state_dict"]["weight"]
    same(whole(shard_like(found, layer.weight.detach())), expected)
    return expected, [str(placement) for placement in layer.weight.placements]


@on_two_dimensions
def test_shards_of_tensor_parallelism_and_fsdp_together_are_read_whole(pool: Any, tmp_path: Path) -> None:
    for expected, placements in pool.run(strided, tmp_path / "one", world_size=4):
        assert "Strided" in placements[0] or "_S" in placements[0]
        same(sharded.read(tmp_path / "one")["state_dict"]["weight"], expected)
        same(expected, torch.arange(27.0).reshape(9, 3))


def hybrid(path: Path) -> Any:
    options = {"device_mesh": (2, 2)}
    ours = trainer("sharded", 4, options=options, max_epochs=1)
    fit(Net(), ours)
    ours.save_checkpoint(path)
    return fit(Net(), trainer("sharded", 4, options=options), path)


def test_replicas_of_a_hybrid_mesh_write_each_shard_once(pool: Any, tmp_path: Path) -> None:
    expected = fit(Net(), trainer("single_device", 1))
    for found in pool.run(hybrid, tmp_path / "one.ckpt", world_size=4, group=False):
        near(found, expected)
    manifest = json.loads((tmp_path / "one.ckpt" / "manifest.json").read_text())
    assert [piece["file"][-9:] for piece in manifest["tensors"]["model.before.weight"]["pieces"]] == [
        "rank0.bin", "rank1.bin",
    ]  # fmt: skip


def offloaded(path: Path) -> Any:
    saved("sharded", path, {"cpu_offload": True})
    return fit(Net(), trainer("full", options={"cpu_offload": True}), path)


def test_shards_in_host_memory_are_saved_and_resumed(pool: Any, tmp_path: Path) -> None:
    expected = fit(Net(), trainer("single_device", 1))
    for found in pool.run(offloaded, tmp_path / "one.ckpt", group=False):
        near(found, expected)


# ---- metrics, an engine ----------------------------------------------------------------------------------------------


class Measured(Net):
    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanSquaredError

        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.head(torch.tanh(self.blocks(self.before(batch[0]))))
        self.error(output.detach(), batch[1].to(output.dtype))
        self.log("error", self.error, on_step=False, on_epoch=True)
        return F.mse_loss(output, batch[1])


def measured(kind: str, folder: Path) -> Any:
    found = []
    for path in (None, folder / f"{kind}.ckpt"):
        saves = [] if path else [Saves(folder / f"{kind}.ckpt", 5)]
        ours = trainer(kind, callbacks=saves)
        fit(Measured(), ours, path)
        found.append(float(ours.callback_metrics["error"]))
    return found


@pytest.mark.parametrize("kind", SHARDED)
def test_a_metric_object_counts_all_ranks_and_is_resumed_inside_an_epoch(pool: Any, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchmetrics")
    ours = trainer("single_device", 1)
    fit(Measured(), ours)
    expected = float(ours.callback_metrics["error"])
    for uninterrupted, resumed in pool.run(measured, kind, tmp_path, group=False):
        assert uninterrupted == resumed == pytest.approx(expected, rel=1e-6)


def engine_saves(kind: str, ranks: int, path: Path, loads: bool) -> Any:
    engine = Engine(accelerator="cpu", strategy=FSDPStrategy(state_dict_type=kind), devices=ranks)  # type: ignore[arg-type]
    engine.launch()
    torch.manual_seed(0 if not loads else 7)
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    model, optimizer = engine.setup(module, torch.optim.Adam(module.parameters(), lr=0.1))
    if not loads:
        engine.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        engine.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    else:
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        engine.load(path, state)
        assert state["step"] == 3
    plain = optimizer.state_dict()["state"]
    return {name: whole(value) for name, value in module.state_dict().items()}, map_leaves(whole, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_saves_on_two_ranks_and_loads_on_three(pool: Any, tmp_path: Path, kind: str) -> None:
    before = pool.run(engine_saves, kind, 2, tmp_path / "one.ckpt", False, group=False)
    after = pool.run(engine_saves, kind, 3, tmp_path / "one.ckpt", True, world_size=3, group=False)
    for found in (*before, *after):
        same(found, before[0])


# ---- processes that the Trainer starts -------------------------------------------------------------------------------


def started_here(folder: Path) -> Any:
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_"))]:
        del os.environ[name]  # no launcher has started this one
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    module, average = Net(), Average()
    ours = trainer("sharded", options={"start_method": "fork"}, max_epochs=1, callbacks=[average])
    ours.fit(module, loader())
    returned = {name: value.clone() for name, value in module.state_dict().items()}
    ours.save_checkpoint(folder / "one.ckpt")
    again = trainer("sharded", options={"start_method": "fork"}, callbacks=[Average()])
    again.fit(module, loader(), ckpt_path=folder / "one.ckpt")
    return returned, average.loaded, dict(module.state_dict()), again.global_step


@pytest.mark.skipif(not LONG, reason="make test-faults")
def test_processes_that_the_trainer_starts_return_whole_weights_and_averages(pool: Any, tmp_path: Path) -> None:
    expected = averaged("single_device", 1, tmp_path / "alone.ckpt", False)
    one = TorchCheckpointIO().load_checkpoint(tmp_path / "alone.ckpt")["state_dict"]
    with pool.fresh() as processes:  # one that has been in a group has threads, and cannot be copied
        [(returned, means, weights, steps)] = processes.run(started_here, tmp_path, world_size=1, group=False)
    near(returned, one)
    near(means, expected)
    near(weights, fit(Net(), trainer("single_device", 1))["weights"])
    assert steps == 6
