"""An optimizer whose state is spread over the ranks trains, saves and resumes as the plain one does."""

from __future__ import annotations

import itertools
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.base.tree import parameters_of
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.testing import FakeAccelerator


def data(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def zero_redundancy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's import of it says that torch is outdated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


class Net(LightningModule):
    """Two groups of parameters, with a scheduler; the state of Adam is sharded or whole."""

    def __init__(self, sharded: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.sharded = sharded

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"].clear()  # the runs that go on save nothing on the way

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net[0].parameters())}, {"params": list(self.net[3].parameters()), "lr": 0.02}]
        optimizer: torch.optim.Optimizer
        if self.sharded:
            optimizer = zero_redundancy()(groups, optimizer_class=torch.optim.Adam, lr=0.05, betas=(0.8, 0.99))
        else:
            optimizer = torch.optim.Adam(groups, lr=0.05, betas=(0.8, 0.99))
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def trainer(folder: Path, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "default_root_dir": folder, "gradient_clip_val": 0.1, "max_epochs": -1,
        "accumulate_grad_batches": 2,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def fitted(folder: Path, sharded: int, steps: int, resumes: str | None = None) -> Tensor:
    """Train to ``steps``; a callback saves on the way, unless this goes on from a file, and the trainer at the end."""
    module = Net(sharded)
    torch.manual_seed(int(os.environ["RANK"]))  # each rank draws its own dropout
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [] if resumes else [saver]
    ours = trainer(folder, max_steps=steps, callbacks=callbacks, enable_checkpointing=bool(callbacks))
    ours.fit(module, DataLoader(data(), batch_size=2), ckpt_path=resumes)
    ours.save_checkpoint(folder / "end.ckpt")
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def whole(pool: Any, folders: tuple[Path, Path]) -> list[list[Tensor]]:
    """Nine steps in one go: what each rank has, of the plain optimizer and of the sharded one."""
    return [pool.run(fitted, folder, sharded, 9, group=False) for sharded, folder in enumerate(folders)]


def test_it_trains_as_the_plain_optimizer(whole: list[list[Tensor]]) -> None:
    for plain, sharded in zip(*whole, strict=True):
        same(sharded, plain)
    same(whole[1][0], whole[1][1])


@pytest.mark.parametrize("name", ["step=4.ckpt", "end.ckpt"])
def test_s2_13_its_checkpoint_is_that_of_the_plain_optimizer(
    whole: list[list[Tensor]], folders: tuple[Path, Path], name: str
) -> None:
    plain, sharded = (TorchCheckpointIO().load_checkpoint(folder / name) for folder in folders)
    same(sharded["optimizer_states"], plain["optimizer_states"])
    same(sharded["state_dict"], plain["state_dict"])
    same(sharded["lr_schedulers"], plain["lr_schedulers"])
    assert sorted(sharded["optimizer_states"][0]["state"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["step=4.ckpt", "step=5.ckpt"])
@pytest.mark.parametrize(("saved", "resumed"), [(False, True), (True, False), (True, True)])
def test_a_run_goes_on_exactly_under_either(
    pool: Any,
    whole: list[list[Tensor]],
    folders: tuple[Path, Path],
    tmp_path: Path,
    saved: bool,
    resumed: bool,
    name: str,
) -> None:
    ranks = pool.run(fitted, tmp_path, resumed, 9, str(folders[saved] / name), group=False)
    for rank, one in zip(ranks, whole[0], strict=True):
        same(rank, one)
    states = [TorchCheckpointIO().load_checkpoint(folder / "end.ckpt") for folder in (tmp_path, folders[0])]
    same(states[0]["optimizer_states"], states[1]["optimizer_states"])


def without_its_state(folder: Path, path: str) -> Tensor:
    class Forgetful(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_load_checkpoint(checkpoint)
            for group in checkpoint["optimizer_states"][0]["state"].values():
                group["exp_avg"].zero_()

    module = Forgetful(True)
    trainer(folder, max_steps=9).fit(module, DataLoader(data(), batch_size=2), ckpt_path=path)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_the_state_matters(pool: Any, whole: list[list[Tensor]], folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The control: a run that goes on with other moments ends elsewhere."""
    [first, _] = pool.run(without_its_state, tmp_path, str(folders[1] / "step=4.ckpt"), group=False)
    assert not torch.equal(first, whole[0][0])


def what_is_kept(folder: Path, path: str) -> Any:
    """How many parameters each rank keeps the state of, and what it gives to a checkpoint."""
    module = Net(True)
    ours = trainer(folder, max_steps=6)
    ours.fit(module, DataLoader(data(), batch_size=2), ckpt_path=path)
    strategy: Any = ours.strategy
    [optimizer] = strategy.optimizers
    own = {len(state) for state in optimizer.optim.state.values()}
    state = strategy.optimizer_state(optimizer)
    return len(optimizer.optim.state), own, len(optimizer.state), sorted(state.get("state", {}))


def test_each_rank_keeps_its_own_part_once_and_rank_zero_gives_the_whole(
    pool: Any, whole: list[list[Tensor]], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = pool.run(what_is_kept, tmp_path, str(folders[1] / "step=4.ckpt"), group=False)
    assert first[0] + second[0] == 4
    assert first[1] == second[1] == {3}
    assert first[2] == second[2] == 0
    assert first[3] == [0, 1, 2, 3]
    assert second[3] == []


def whole_afterwards(folder: Path) -> Any:
    module = Net(True)
    torch.manual_seed(int(os.environ["RANK"]))
    ours = trainer(folder, max_steps=9)
    ours.fit(module, DataLoader(data(), batch_size=2))
    strategy: Any = ours.strategy
    optimizer = strategy.whole_optimizer(strategy.optimizers[0])
    plain = torch.optim.SGD(module.parameters())
    assert strategy.whole_optimizer(plain) is plain
    mine = [any(one is parameter for one in module.parameters()) for parameter in parameters_of(optimizer)]
    return type(optimizer).__name__, optimizer.state_dict(), mine


def test_a_process_that_is_no_rank_can_have_the_plain_optimizer(
    pool: Any, whole: list[list[Tensor]], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    [(name, state, mine), _] = pool.run(whole_afterwards, tmp_path, group=False)
    assert name == "Adam"
    assert mine == [True] * 4
    same(state, TorchCheckpointIO().load_checkpoint(folders[0] / "end.ckpt")["optimizer_states"][0])


def on_devices(folder: Path, path: str) -> Any:
    """Where each rank's part lies at the end of training and after the run, and which file it leaves."""
    with FakeAccelerator.recording() as record:

        class Watched(Net):
            def on_train_end(self) -> None:
                self.during = places()

        def places() -> set[str]:
            [optimizer] = strategy.optimizers
            return {str(state["exp_avg"].device) for state in optimizer.optim.state.values()}  # type: ignore[attr-defined]

        module = Watched(True)
        ours = trainer(folder, max_steps=6, accelerator="fake", devices=2)
        strategy = ours.strategy
        ours.fit(module, DataLoader(data(), batch_size=2), ckpt_path=path)
        before = len(record.syncs)
        ours.save_checkpoint(folder / "end.ckpt")
        return module.during, places(), [sync.what for sync in record.syncs[before:]]


def test_the_device_is_free_after_a_run_and_the_state_still_whole(
    pool: Any, whole: list[list[Tensor]], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    ranks = pool.run(
        on_devices, tmp_path, str(folders[0] / "step=4.ckpt"), group=False, environ={"DRIVETRAIN_FAKE_DEVICES": "2"}
    )
    assert [rank[:2] for rank in ranks] == [({"cpu:0"}, {"cpu"}), ({"cpu:1"}, {"cpu"})]
    assert "synchronize" in ranks[0][2]  # the copies to the host have arrived before they are written
    [state] = TorchCheckpointIO().load_checkpoint(tmp_path / "end.ckpt")["optimizer_states"]
    assert [int(one["step"]) for one in state["state"].values()] == [6] * 4


def with_the_engine(folder: Path, sharded: bool) -> Tensor:
    """Three steps, a file, and three more by everything made anew from that file."""
    for part in range(2):
        engine = Engine(accelerator="cpu", strategy="ddp")
        engine.launch()
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model = engine.setup_module(plain)
        make = partial(zero_redundancy(), optimizer_class=torch.optim.Adam) if sharded else torch.optim.Adam
        optimizer = engine.setup_optimizers(make(plain.parameters(), lr=0.05))
        if part == 1:
            engine.load(folder / "half.ckpt", {"model": model, "optimizer": optimizer})
        loader = engine.setup_dataloaders(DataLoader(data(24), batch_size=2))
        for x, y in itertools.islice(loader, 3 * part, 3 * part + 3):
            optimizer.zero_grad()
            engine.backward(F.mse_loss(model(x), y))
            optimizer.step()
        if part == 0:
            engine.save(folder / "half.ckpt", {"model": model, "optimizer": optimizer})
    return torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])


def test_an_engine_saves_it_whole(pool: Any, tmp_path: Path) -> None:
    plain = pool.run(with_the_engine, tmp_path, False, group=False)
    expected = TorchCheckpointIO().load_checkpoint(tmp_path / "half.ckpt")
    same(pool.run(with_the_engine, tmp_path, True, group=False), plain)
    same(TorchCheckpointIO().load_checkpoint(tmp_path / "half.ckpt"), expected)
