"""A loop of one's own on several processes gives the numbers of one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.base.tree import map_leaves
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.strategies import DDPStrategy


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def trained(
    batch_size: int, accumulate: int, path: str, epochs: tuple[int, ...] = (0, 1), resume: bool = False
) -> dict[str, Any]:
    """Two epochs of 48 samples in global batches of 12; saved after each."""
    engine = Engine(accelerator="cpu", precision="64-true")
    engine.launch()
    engine.seed_everything(5)
    net = model()
    net, optimizer = engine.setup(net, torch.optim.Adam(net.parameters(), lr=0.05))
    loader = engine.setup_dataloaders(DataLoader(data(48), batch_size=batch_size, shuffle=True))
    state = {"net": net, "optimizer": optimizer, "rng": engine.rng, "epoch": -1}
    if resume:
        engine.load(path, state)
    norms, seen = [], []
    for epoch in epochs:
        for index, (x, y) in enumerate(loader):
            seen += x[:, 0].tolist()
            last = (index + 1) % accumulate == 0
            with engine.no_backward_sync(net, enabled=not last):
                engine.backward(F.mse_loss(net(x), y) / accumulate)
            if last:
                norms.append(float(engine.clip_gradients(net, optimizer, max_norm=0.1)))
                optimizer.step()
                optimizer.zero_grad()
        if not resume:
            engine.save(f"{path}.{epoch}", {**state, "epoch": epoch})
    return {"norms": norms, "weights": torch.cat([p.detach().flatten() for p in net.parameters()]), "seen": seen}


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_the_same_global_batch_trains_the_same(pool: Any, tmp_path: Path, world_size: int, accumulate: int) -> None:
    [one] = pool.run(trained, 12, 1, str(tmp_path / "one"), world_size=1)
    ranks = pool.run(trained, 12 // world_size // accumulate, accumulate, str(tmp_path / "many"), world_size=world_size)
    for rank in ranks:  # the model hands out 32 bits, as users' losses expect
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-6)
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=1e-6, atol=1e-6)
    assert sorted(x for rank in ranks for x in rank["seen"]) == sorted(one["seen"])
    again = pool.run(
        trained, 12 // world_size // accumulate, accumulate, str(tmp_path / "many.0"), (1,), True,
        world_size=world_size,
    )  # fmt: skip
    for rank, resumed in zip(ranks, again, strict=True):
        # As if it had never stopped. DDP arranges its buckets anew after the first step, and the order in which three
        # ranks' gradients are summed depends on that; two numbers have one sum.
        torch.testing.assert_close(resumed["weights"], rank["weights"], rtol=1e-12 * (world_size > 2), atol=0)


def test_without_synchronisation_the_ranks_part(pool: Any, tmp_path: Path) -> None:
    """The negative control."""
    first, second = pool.run(unsynchronised, world_size=2)
    assert not torch.equal(first, second)


def unsynchronised() -> torch.Tensor:
    engine = Engine(accelerator="cpu")
    net = model()
    net, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for x, y in engine.setup_dataloaders(DataLoader(data(8), batch_size=2)):
        with engine.no_backward_sync(net):
            engine.backward(F.mse_loss(net(x), y))
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def saved_by_rank_0_only(path: str) -> str:
    engine = Engine(accelerator="cpu")
    engine.launch()
    with pytest.raises(ConfigurationError) as raised:
        engine.save(path, {"epoch": 1}) if engine.is_global_zero else engine.load(path)
    return str(raised.value)


def test_a_save_on_one_rank_is_named(pool: Any, tmp_path: Path) -> None:
    for text in pool.run(saved_by_rank_0_only, str(tmp_path / "state.ckpt"), world_size=2):
        assert "rank 0: barrier('Engine.save'); rank 1: barrier('Engine.load')" in text


def loaded(count: int, batch_size: int) -> list[list[float]]:
    engine = Engine(accelerator="cpu")
    engine.launch()
    loader = engine.setup_dataloaders(DataLoader(TensorDataset(torch.arange(float(count))), batch_size=batch_size))
    assert len(loader) == len(list(loader))
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_as_many_samples(pool: Any, world_size: int) -> None:
    """A loop of one's own cannot drop what is too much, so the first samples come twice."""
    ranks = pool.run(loaded, 7, 2, world_size=world_size)
    assert len({len(batches) for batches in ranks}) == 1
    assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    seen = [x for batches in ranks for batch in batches for x in batch]
    assert set(seen) == set(map(float, range(7)))
    assert len(seen) == -(-7 // world_size) * world_size


def together(path: str) -> dict[str, Any]:
    engine = Engine(accelerator="cpu")
    engine.launch()
    rank = engine.global_rank
    with engine.rank_zero_first():
        if rank == 0:
            Path(path).write_text("ready")
        there = Path(path).exists()
    tensors = {"a": torch.full((2,), float(rank)), "b": [torch.tensor(rank)], "c": "kept"}
    return {
        "place": (rank, engine.local_rank, engine.node_rank, engine.world_size, engine.is_global_zero),
        "there": there,
        "gathered": engine.all_gather(tensors),
        "reduced": engine.all_reduce(tensors, reduce_op="sum"),
        "broadcast": engine.broadcast({"from": rank}, src=1),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_processes_do_together(pool: Any, tmp_path: Path, world_size: int) -> None:
    ranks = pool.run(together, str(tmp_path / "file"), world_size=world_size)
    numbers = torch.arange(world_size)
    for rank, found in enumerate(ranks):
        assert found["place"] == (rank, rank, 0, world_size, rank == 0)
        assert found["there"]
        assert torch.equal(found["gathered"]["a"], numbers.float()[:, None].expand(-1, 2))
        assert torch.equal(found["gathered"]["b"][0], numbers)
        assert found["gathered"]["c"] == found["reduced"]["c"] == "kept"
        assert found["reduced"]["a"].tolist() == [float(numbers.sum())] * 2
        assert found["broadcast"] == {"from": 1}


class Gathering(LightningModule):
    """Gathers numbers in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Any = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found = self.all_gather(numbers_of(self.global_rank))


def numbers_of(rank: int) -> dict[str, Any]:
    return {
        "int": 2**40 + rank, "float": 0.1 + rank, "bool": rank == 0, "text": f"rank {rank}", "none": None,
        "nested": [(rank, 1.5), {"numpy": np.float32(rank), "array": np.arange(2) + rank}],
    }  # fmt: skip


def exchanged_numbers() -> dict[str, Any]:
    engine = Engine(accelerator="cpu")
    engine.launch()
    mine = numbers_of(engine.global_rank)
    module = Gathering()
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(module, [torch.ones(1)], verbose=False)
    return {
        "gathered": engine.all_gather(mine),
        "by the module": module.found,
        **{op: engine.all_reduce(mine, reduce_op=op) for op in ("mean", "sum", "min", "max")},
    }


def as_python(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, tree)


def kinds_in(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf), tree)


def test_plain_numbers_are_gathered_and_reduced_as_tensors(pool: Any) -> None:
    ranks = pool.run(exchanged_numbers)
    for rank, found in enumerate(ranks):
        for how in ("gathered", "by the module"):
            assert as_python(found[how]) == {
                "int": [2**40, 2**40 + 1], "float": [0.1, 1.1], "bool": [True, False], "text": f"rank {rank}",
                "none": None, "nested": [([0, 1], [1.5, 1.5]), {"numpy": [0.0, 1.0], "array": [[0, 1], [1, 2]]}],
            }  # fmt: skip
        reduced = {op: as_python(found[op]) for op in ("mean", "sum", "min", "max")}
        assert [reduced[op]["int"] for op in reduced] == [2**40 + 0.5, 2**41 + 1, 2**40, 2**40 + 1]
        assert [reduced[op]["float"] for op in reduced] == [(0.1 + 1.1) / 2, 0.1 + 1.1, 0.1, 1.1]
        assert [reduced[op]["bool"] for op in reduced] == [0.5, 1, False, True]
        assert reduced["mean"]["nested"] == [(0.5, 1.5), {"numpy": 0.5, "array": [0.5, 1.5]}]
        assert {reduced[op]["text"] for op in reduced} == {f"rank {rank}"}
    [alone] = pool.run(exchanged_numbers, world_size=1)
    assert as_python(alone["by the module"]) == as_python(alone["gathered"])
    assert as_python(alone["sum"]["int"]) == 2**40
    assert {how: kinds_in(found) for how, found in alone.items()} == {
        how: kinds_in(found) for how, found in ranks[0].items()
    }


def test_processes_that_must_be_started_need_a_function() -> None:
    engine = Engine(accelerator="cpu", devices=2, strategy="ddp_spawn")
    with pytest.raises(ConfigurationError, match=r"2 processes by 'spawn', and they need something to run. Write def"):
        engine.launch()
    with pytest.raises(ConfigurationError, match="they need something to run"):
        engine.setup(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="are not connected yet. Call engine.launch"):
        engine.barrier()


# ---- what a strategy keeps of each rank ------------------------------------------------------------------------------


class Feedback(DDPStrategy):
    """Rounds gradients and adds what rounding has left out to the next ones, on each rank by itself."""

    left = torch.zeros(4)
    given: Any = None

    def step(self, model: nn.Module, gradient: Tensor) -> None:
        exact = gradient + self.left * (1 + self.global_rank)
        rounded = (exact * 4).round() / 4
        self.left = exact - rounded
        with torch.no_grad():
            model.weight -= self.reduce(rounded)  # type: ignore[operator]

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        return {"left": self.left, "rank": self.global_rank, "of": type(module).__name__}

    def load_rank_state(self, module: nn.Module, state: Any) -> None:
        self.left, self.given = state["left"], (state["rank"], state["of"], type(module).__name__)


def with_feedback(path: Path, before: int, after: int) -> tuple[Tensor, Any, int]:
    """Steps before and after a save; ``before=0`` loads it in their place."""
    torch.manual_seed(1)
    strategy = Feedback()
    engine = Engine(accelerator="cpu", strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
    engine.launch()
    model = engine.setup(nn.Linear(4, 1, bias=False))
    teacher = nn.Linear(4, 1)  # which no strategy has set up
    ours = {"model": model, "teacher": teacher, "steps": 0}
    if not before:
        assert engine.load(path, ours) == {}
    steps = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))[engine.global_rank]
    for number in range(ours["steps"], before or ours["steps"] + after):
        strategy.step(model.module, steps[number])
    if before:
        engine.save(path, {**ours, "steps": before})
        for number in range(before, before + after):
            strategy.step(model.module, steps[number])
        return model.weight.detach().clone(), strategy.given, 0
    return model.weight.detach().clone(), strategy.given, len(engine.load(path))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_strategy_gets_back_what_it_kept_of_each_rank(pool: Any, tmp_path: Path, world_size: int) -> None:
    path = tmp_path / "a.ckpt"
    undisturbed = pool.run(with_feedback, path, 3, 4, world_size=world_size, group=False)
    assert len(list(tmp_path.iterdir())) == world_size
    resumed = pool.run(with_feedback, path, 0, 4, world_size=world_size, group=False)
    for rank, ((expected, *_), (found, given, entries)) in enumerate(zip(undisturbed, resumed, strict=True)):
        assert torch.equal(found, expected)
        assert given == (rank, "Linear", "Linear")
        assert entries == 3  # model, teacher, steps


def loaded_with(path: Path, strict: bool) -> tuple[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = Feedback()
        engine = Engine(accelerator="cpu", strategy=strategy, devices=int(os.environ["WORLD_SIZE"]))
        engine.launch()
        model = engine.setup(nn.Linear(4, 1, bias=False))
        try:
            engine.load(path, {"model": model}, strict=strict)
        except CheckpointError as error:
            return str(error), strategy.given
    return " ".join(str(each.message) for each in caught), strategy.given


def test_a_lost_file_of_a_rank_is_an_error_or_left_out_and_so_are_those_of_other_numbers(
    pool: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(with_feedback, path, 3, 0, group=False)
    [(said, given)] = pool.run(loaded_with, path, True, world_size=1, group=False)
    assert "saved by 2 processes, and there are 1: what Feedback has kept" in said
    assert given is None
    next(tmp_path.glob("*.rank1")).unlink()
    lost = pool.run(loaded_with, path, True, group=False)
    assert all("pass strict=False to load the rest without it" in said and given is None for said, given in lost)
    left_out = pool.run(loaded_with, path, False, group=False)
    assert "It is left out" in left_out[0][0]
    assert [given for _, given in left_out] == [None, None]
