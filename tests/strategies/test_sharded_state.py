"""Sharded models: their files are those of a model on one process, and a strategy that does not shard refuses them."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Engine, LightningModule, Trainer
from drivetrain.base.tree import leaves
from drivetrain.errors import CheckpointError
from drivetrain.strategies import DDPStrategy
from drivetrain.strategies.optimizer_states import by_name, by_number, parameter_names
from drivetrain.strategies.parallel import ParallelStrategy
from drivetrain.strategies.sharded_state import (
    is_dtensor,
    load_whole_model_state,
    load_whole_optimizer_states,
    whole_model_state,
    whole_optimizer_state,
)


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def sharded(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, when it imports itself
        from torch.distributed.fsdp import fully_shard
    fully_shard(module)
    return module


def net(extra: bool = False) -> nn.Module:
    """Three does not divide by two ranks, and the last layer has one row: one rank has nothing of it."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    if extra:
        module.register_buffer("count", torch.tensor(7))
    return module


def values(module: nn.Module) -> dict[str, Any]:
    """Its state as plain tensors, on every rank."""
    state = module.state_dict()
    return {name: (value.full_tensor() if is_dtensor(value) else value).clone() for name, value in state.items()}


def trained(module: nn.Module, *optimizers: Any, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(5)  # the same on every rank, so that gradients are those of one process
    for _ in range(steps):
        for optimizer in optimizers:
            x = torch.randn(4, 5, generator=generator)

            def closure(optimizer: Any = optimizer, x: Any = x) -> Any:
                optimizer.zero_grad()
                loss = module(x).pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)


# ---- the module's state ----------------------------------------------------------------------------------------------


def model_there_and_back() -> dict[str, Any]:
    module = sharded(net(extra=True))
    assert any(is_dtensor(parameter) for parameter in module.parameters())
    saved, rank = whole_model_state(module), int(os.environ["RANK"])
    assert bool(saved) is (rank == 0)
    assert not any(is_dtensor(value) for value in saved.values())
    plain = net(extra=True)
    if rank == 0:
        same(dict(saved), dict(plain.state_dict()))
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    load_whole_model_state(module, other)
    same(values(module), other)
    assert all(is_dtensor(parameter) for parameter in module.parameters())
    return other


def test_a_sharded_module_gives_and_takes_the_state_of_a_plain_one(pool: Any) -> None:
    pool.run(model_there_and_back)


def names_that_do_not_fit() -> list[str]:
    module, messages = sharded(net()), []
    full = net().state_dict()
    for wrong in (
        {name: value for name, value in full.items() if name != "0.bias"},
        {**full, "extra": torch.zeros(1)},
        {**full, "0.bias": torch.zeros(4)},
    ):
        with pytest.raises(RuntimeError) as caught:
            load_whole_model_state(module, wrong)
        messages.append(str(caught.value))
    load_whole_model_state(module, {}, strict=False)
    return messages


def test_names_and_shapes_that_do_not_fit_are_errors(pool: Any) -> None:
    for missing, unexpected, shape in pool.run(names_that_do_not_fit):
        assert 'Missing key(s) in state_dict: "0.bias"' in missing
        assert 'Unexpected key(s) in state_dict: "extra"' in unexpected
        assert "size mismatch for 0.bias" in shape


def from_meta() -> None:
    plain = net()
    with torch.device("meta"):
        module = sharded(net())
    load_whole_model_state(module, plain.double().state_dict())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    same(values(module), dict(plain.float().state_dict()))


def test_parameters_on_the_meta_device_are_replaced(pool: Any) -> None:
    pool.run(from_meta)


# ---- optimizers ------------------------------------------------------------------------------------------------------


def adam(module: Any) -> list[Any]:
    return [torch.optim.Adam([{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.1}])]


def two(module: Any) -> list[Any]:
    return [
        torch.optim.SGD([*module[2].parameters(), *module[1].parameters()], lr=0.1, momentum=0.9),
        torch.optim.AdamW(module[0].parameters(), amsgrad=True),
    ]


def lbfgs(module: Any) -> list[Any]:
    return [torch.optim.LBFGS(module.parameters(), max_iter=3, history_size=2)]


Make = Callable[[Any], list[Any]]


def even() -> nn.Module:
    """LBFGS flattens gradients, which torch cannot do with uneven shards."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))


def kinds(optimizer: Any) -> dict[str, bool]:
    """Which tensors of its state are sharded; torch mixes single numbers of either kind."""
    found = leaves(optimizer.state_dict()["state"])
    return {path: is_dtensor(leaf) for path, leaf in found if isinstance(leaf, Tensor) and leaf.ndim}


def optimizers_there_and_back(make: Make, build: Callable[[], nn.Module], freezes: bool) -> None:
    plain, module = build(), sharded(build())
    of_plain, of_sharded = make(plain), make(module)
    trained(plain, *of_plain), trained(module, *of_sharded)
    if freezes:
        for parameter in (next(plain.parameters()), next(module.parameters())):
            parameter.requires_grad_(False)
    saved, rank = [whole_optimizer_state(optimizer) for optimizer in of_sharded], int(os.environ["RANK"])
    if rank == 0:
        expected = [optimizer.state_dict() for optimizer in of_plain]
        torch.testing.assert_close(saved, expected, rtol=1e-4, atol=1e-6)  # FSDP sums gradients in another order
    else:
        assert saved == [{} for _ in saved]
    from torch import distributed

    distributed.broadcast_object_list(shared := [saved, whole_model_state(module)])
    shared = copy.deepcopy(shared)  # plain tensors are still those of the optimizer
    again = sharded(build())
    load_whole_model_state(again, shared[1])
    of_again = make(again)
    load_whole_optimizer_states(of_again, shared[0])
    if freezes:
        for other in (module, again):
            other.requires_grad_(True)
    assert [kinds(optimizer) for optimizer in of_again] == [kinds(optimizer) for optimizer in of_sharded]
    trained(module, *of_sharded), trained(again, *of_again)
    same(values(again), values(module))


@pytest.mark.parametrize(
    ("make", "build", "freezes"),
    [(adam, net, False), (two, net, False), (adam, net, True), (lbfgs, even, False)],
    ids=["groups", "several", "frozen", "lbfgs"],
)
def test_sharded_optimizers_give_and_take_the_state_of_plain_ones(
    pool: Any, make: Make, build: Callable[[], nn.Module], freezes: bool
) -> None:
    pool.run(optimizers_there_and_back, make, build, freezes)


def without_a_step() -> None:
    module = sharded(net())
    [optimizer] = adam(module)
    state = whole_optimizer_state(optimizer)
    assert state == {} or state["state"] == {}
    assert not optimizer.state  # nothing has stepped it to find out
    load_whole_optimizer_states([optimizer], [adam(net())[0].state_dict()])
    assert not optimizer.state
    with pytest.raises(CheckpointError, match="1 optimizer states, and configure_optimizers made 2"):
        load_whole_optimizer_states([optimizer, optimizer], [state])


def test_an_optimizer_that_has_not_stepped_stays_so(pool: Any) -> None:
    pool.run(without_a_step)


# ---- names -----------------------------------------------------------------------------------------------------------


def as_torch_names_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    module = sharded(net())
    optimizers = two(module)
    trained(module, *optimizers)
    theirs = get_optimizer_state_dict(module, optimizers)
    names = [parameter_names(module, optimizer) for optimizer in optimizers]
    named = [by_name(optimizer.state_dict(), own) for optimizer, own in zip(optimizers, names, strict=True)]
    ours = {
        "state": {name: state for each in named for name, state in each["state"].items()},
        "param_groups": [group for each in named for group in each["param_groups"]],
    }
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for name, state in ours["state"].items():
        for key, value in state.items():
            assert value is theirs["state"][name][key] or torch.equal(value, theirs["state"][name][key])
    for optimizer, own, state in zip(optimizers, names, named, strict=True):
        back = by_number(state, own)
        assert back["param_groups"] == optimizer.state_dict()["param_groups"]
        assert {number: id(each) for number, each in back["state"].items()} == {
            number: id(each) for number, each in optimizer.state_dict()["state"].items()
        }
    other = sharded(net())
    set_optimizer_state_dict(other, others := two(other), ours)
    for optimizer, own, state in zip(others, names, named, strict=True):
        assert by_name(optimizer.state_dict(), own)["state"].keys() == state["state"].keys()


def test_names_are_those_of_torchs_distributed_checkpoints(pool: Any) -> None:
    pool.run(as_torch_names_them)


# ---- with a Trainer --------------------------------------------------------------------------------------------------


class Sharded(ParallelStrategy):
    """FSDP2, as far as these tests need it."""

    facts = ParallelStrategy.facts.but(restores_after_setup=True)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        module = super().setup_module(module, move_to_device)
        sharded(module.net)  # type: ignore[arg-type]
        return module

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole_model_state(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        load_whole_model_state(self.lightning_module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return whole_optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        load_whole_optimizer_states(self.optimizers, checkpoint["optimizer_states"])


class Halves(Sharded):
    """Without the four methods."""

    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    optimizer_state = ParallelStrategy.optimizer_state


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(8, 5, generator=generator), torch.randn(8, 1, generator=generator))
    return DataLoader(dataset, batch_size=4 // int(os.environ.get("WORLD_SIZE", 1)))


def fitted(strategy: Any, epochs: int, resumes: Path | None, saves: Path) -> tuple[dict[str, Any], Any]:
    """What the file holds that is saved at the end."""
    ours = Trainer(
        strategy=strategy, max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=True,
    ) if isinstance(strategy, str) else Trainer(
        strategy=strategy, max_epochs=epochs, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random state.*")
        ours.fit(module, loader(), ckpt_path=resumes)
    ours.save_checkpoint(saves)
    held = ours.strategy.load_checkpoint(saves)
    return held["state_dict"], held["optimizer_states"]


def on_two(folder: Path, epochs: int, resumes: Path | None = None) -> None:
    fitted(Sharded(), epochs, resumes, folder / f"two-{epochs}-{resumes is not None}.ckpt")


def test_a_file_goes_from_two_sharded_processes_to_one_and_back(pool: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one.ckpt", tmp_path / "two-1-False.ckpt"
    first = fitted("single_device", 1, None, one)
    whole = fitted("single_device", 3, None, tmp_path / "whole.ckpt")
    pool.run(on_two, tmp_path, 1, group=False)
    pool.run(on_two, tmp_path, 3, one, group=False)
    close = {"rtol": 1e-4, "atol": 1e-6}  # two processes sum gradients in another order
    there = torch.load(two, weights_only=True)
    torch.testing.assert_close((there["state_dict"], there["optimizer_states"]), first, **close)
    resumed = fitted("single_device", 3, two, tmp_path / "from_two.ckpt")
    torch.testing.assert_close(resumed, whole, **close)
    there = torch.load(tmp_path / "two-3-True.ckpt", weights_only=True)
    torch.testing.assert_close((there["state_dict"], there["optimizer_states"]), whole, **close)


class SaveAt(Callback):
    """Saves inside a window."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.progress.total_batches == 5:
            trainer.save_checkpoint(self.path)


def accumulated(path: Path, resumes: bool) -> dict[str, Any]:
    ours = Trainer(
        strategy=Sharded(), max_epochs=1, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=4,
        callbacks=[] if resumes else [SaveAt(path)],
    )  # fmt: skip
    module = Module()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 5, generator=generator), torch.randn(32, 1, generator=generator))
    ours.fit(module, DataLoader(data, batch_size=2), ckpt_path=path if resumes else None)
    return values(module)


def test_inside_a_window_each_rank_keeps_the_gradients_of_its_shards(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    whole = pool.run(accumulated, path, False, group=False)
    [beside] = tmp_path.glob("a.ckpt.*.rank1")
    held = [torch.load(file, weights_only=True)["restart"]["gradients"] for file in (path, beside)]
    assert [gradients["net.0.weight"].shape for gradients in held] == [(2, 5), (1, 5)]  # of three rows
    same(pool.run(accumulated, path, True, group=False), whole)


def refused() -> list[str]:
    ours = Trainer(strategy=Halves(), max_epochs=1, accelerator="cpu", devices=2, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    ours.fit(Module(), loader())
    messages = []
    for save in (ours.strategy.lightning_module_state_dict, lambda: ours.strategy.optimizer_state(ours.optimizers[0])):
        with pytest.raises(CheckpointError) as caught:
            save()
        messages.append(str(caught.value))
    with pytest.raises(CheckpointError, match=r"net.0.weight is a DTensor"):
        ours.save_checkpoint("never.ckpt")
    assert not Path("never.ckpt").exists()
    return messages


def test_a_strategy_that_does_not_know_dtensors_refuses_to_save_them(pool: Any) -> None:
    for model, optimizer in pool.run(refused, group=False):
        assert model.startswith("net.0.weight is a DTensor")
        assert "override Halves.module_state" in model
        assert optimizer.startswith("Adam's state of net.0.weight is a DTensor")
        assert "override Halves.optimizer_state" in optimizer


def test_plain_tensors_are_not_refused_where_dtensors_are_known(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.tensor  # noqa: F401
    strategy = DDPStrategy()
    module = Module()
    strategy.connect(module)
    assert strategy.lightning_module_state_dict().keys() == module.state_dict().keys()


# ---- with an Engine --------------------------------------------------------------------------------------------------


def by_hand(strategy: Any, resumes: Path | None = None) -> tuple[Engine, dict[str, Any]]:
    engine, module = Engine(accelerator="cpu", devices=2, strategy=strategy), Module()
    engine.launch()
    model, optimizer = engine.setup(module, torch.optim.Adam(module.parameters(), lr=0.05))
    state = {"model": model, "optimizer": optimizer}
    if resumes is not None:
        engine.load(resumes, state)
    for batch in engine.setup_dataloaders(loader()):
        engine.backward(model.training_step(batch, 0))
        optimizer.step()
        optimizer.zero_grad()
    return engine, state


def by_hand_on_two(folder: Path) -> None:
    engine, state = by_hand(Sharded())
    engine.save(folder / "one_epoch.ckpt", state)
    engine, state = by_hand(Sharded(), folder / "one_epoch.ckpt")
    engine.save(folder / "two_epochs.ckpt", state)


def test_an_engine_writes_and_reads_whole_tensors_of_a_sharded_model(pool: Any, tmp_path: Path) -> None:
    pool.run(by_hand_on_two, tmp_path, group=False)
    fitted("single_device", 2, None, tmp_path / "trainer.ckpt")
    expected = torch.load(tmp_path / "trainer.ckpt", weights_only=True)
    found = torch.load(tmp_path / "two_epochs.ckpt", weights_only=True)
    close = {"rtol": 1e-4, "atol": 1e-6}  # two processes sum gradients in another order
    torch.testing.assert_close(found["model"], expected["state_dict"], **close)
    torch.testing.assert_close(found["optimizer"]["state"], expected["optimizer_states"][0]["state"], **close)


def refused_by_hand(folder: Path) -> list[str]:
    engine, state = by_hand(Halves())
    state["stranger"] = torch.optim.Adam([torch.nn.Parameter(state["model"].net[0].weight.detach().clone())])
    state["stranger"].param_groups[0]["params"][0].grad = torch.zeros_like(state["model"].net[0].weight)
    state["stranger"].step()
    messages = []
    for name, part in state.items():
        with pytest.raises(CheckpointError) as caught:
            engine.save(folder / "never.ckpt", {name: part})
        messages.append(str(caught.value))
    assert not (folder / "never.ckpt").exists()
    return messages


def test_an_engine_does_not_save_a_shard_as_the_whole(pool: Any, tmp_path: Path) -> None:
    for model, optimizer, stranger in pool.run(refused_by_hand, tmp_path, group=False):
        assert model.startswith("net.0.weight is a DTensor")
        assert optimizer.startswith("Adam's state of net.0.weight is a DTensor")
        assert stranger.startswith("Adam's state of parameter 0 is a DTensor")


def kept_by_a_callback(folder: Path) -> str:
    from drivetrain.strategies import SingleDeviceStrategy

    weight = sharded(nn.Linear(4, 4)).weight
    with pytest.raises(CheckpointError) as caught:
        SingleDeviceStrategy().save_checkpoint({"callbacks": {"EMA": [weight.detach()]}}, folder / "one.ckpt")
    assert not (folder / "one.ckpt").exists()
    return str(caught.value)


def test_a_shard_in_a_callbacks_state_is_refused_by_a_strategy_that_would_write_rank_zeros(
    pool: Any, tmp_path: Path
) -> None:
    for message in pool.run(kept_by_a_callback, tmp_path):
        assert "callbacks/EMA/0 is a DTensor" in message
        assert "SingleDeviceStrategy.save_checkpoint" in message
