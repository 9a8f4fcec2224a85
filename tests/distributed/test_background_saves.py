"""Checkpoints that several ranks write in the background: equal to others, complete on all ranks or on none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.sharded import Saves, same, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.plugins import AsyncCheckpointIO

KINDS = ["ddp", "fsdp", "fsdp sharded"]


class SavedNet(LightningModule):
    """Batch norm, dropout and a window of three batches: buffers, random state and gradients of each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 1, generator=generator))


def trainer(kind: str, background: bool, *callbacks: Callback, **arguments: Any) -> Trainer:
    from drivetrain.strategies import DDPStrategy, FSDPStrategy

    strategy: Any = DDPStrategy()
    if kind != "ddp":
        strategy = FSDPStrategy(state_dict_type="sharded" if "sharded" in kind else "full")
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=2, accumulate_grad_batches=3, callbacks=list(callbacks),
        plugins=[AsyncCheckpointIO()] if background else [], logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{"max_epochs": 2, "enable_checkpointing": bool(callbacks), **arguments},
    )  # fmt: skip


class Ends(Callback):
    """Keeps the complete weights at the end of training."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {name: whole(each).clone() for name, each in pl_module.state_dict().items()}


def fit(kind: str, folder: Path, background: bool, resumed: Path | None = None) -> dict[str, Tensor]:
    torch.manual_seed(7)
    ends, saver = Ends(), Saves(folder / "middle.ckpt", at=5 if resumed is None else 0)
    job = trainer(kind, background, ends, saver, ModelCheckpoint(folder / "all", save_last="link"))
    job.fit(SavedNet(), DataLoader(data(), 2, shuffle=True), ckpt_path=resumed)
    return ends.weights


def compared(kind: str, folder: Path) -> dict[str, Any]:
    plain = fit(kind, folder / "plain", False)
    background = fit(kind, folder / "background", True)
    names, last = sorted(os.listdir(folder / "background" / "all")), folder / "background" / "all" / "last.ckpt"
    read = [TorchCheckpointIO().load_checkpoint(folder / each / "middle.ckpt") for each in ("plain", "background")]
    links = os.readlink(last)
    resumed = fit(kind, folder / "background", True, folder / "background" / "middle.ckpt")
    return {"weights": (plain, background, resumed), "names": names, "last": links, "read": read}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_its_files_are_those_of_saves_that_wait(pool: Any, tmp_path: Path, kind: str) -> None:
    ranks = pool.run(compared, kind, tmp_path, group=False, timeout=120)
    for rank in ranks:
        plain, background, resumed = rank["weights"]
        for found in (background, resumed):
            same(found, plain)
        one, other = rank["read"]
        assert one.keys() == other.keys()
        same([other["state_dict"], other["optimizer_states"]], [one["state_dict"], one["optimizer_states"]])
        assert repr(other["restart"]) == repr(one["restart"])
        assert repr(other["rng"]) == repr(one["rng"])
        assert [each["name"].split(".")[-1] for each in other["rank_files"]] == ["rank1"]
    writer = ranks[0]  # the others may return while rank 0 still removes what is no longer kept
    assert writer["last"] == "epoch=1-step=4.ckpt"
    assert [name.split(".")[0] for name in writer["names"]] == ["epoch=1-step=4", "epoch=1-step=4", "last"]


class Fails(Callback):
    """From the second checkpoint on, one rank cannot write."""

    def __init__(self, rank: int) -> None:
        self.rank, self.lines = rank, list[str]()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == 1:
            store = trainer.strategy.checkpoint_io
            store._settle()  # on a slow machine the first checkpoint may still be being written
            store.write_records = self.full

    def full(self, path: Path, records: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "the disk is full", str(path))


def failing(kind: str, folder: Path, rank: int) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, every_n_epochs=1)
    job, text = trainer(kind, True, saver, Fails(rank), max_epochs=6), ""
    try:
        job.fit(SavedNet(), DataLoader(data(), 2))
    except CheckpointError as error:
        text = str(error)
    return {"text": text, "best": saver.best_model_path, "epoch": job.current_epoch, "left": sorted(os.listdir(folder))}


@pytest.mark.parametrize("kind", ["ddp", "fsdp sharded"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_makes_the_save_fail_on_all_ranks_and_nothing_is_removed(
    pool: Any, tmp_path: Path, kind: str, rank: int
) -> None:
    for each in pool.run(failing, kind, tmp_path, rank, group=False, timeout=120):
        assert "the disk is full" in each["text"], each
        assert "What was there before is untouched" in each["text"], each
        assert "epoch=0-step=2" in each["best"], each
        assert each["epoch"] == 2  # the next save, or before it
    left = sorted(os.listdir(tmp_path))
    assert {name.split(".")[0] for name in left} <= {"epoch=0-step=2", "epoch=1-step=4"}, left
    found = TorchCheckpointIO().load_checkpoint(tmp_path / "epoch=0-step=2.ckpt")
    assert found["global_step"] == 2
    assert not TorchCheckpointIO().exists(tmp_path / "epoch=1-step=4.ckpt")


def planned(world_size: int, tensors: int) -> dict[str, Any]:
    """What rank 3 of many, which do not exist, would write in two saves of the same tensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from drivetrain.strategies import sharded_files

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=world_size)
    mesh, shapes, calls = init_device_mesh("cpu", (world_size,)), [(2048, 2), (4096,), (1000, 8)], list[Any]()
    names = sharded_files.TensorNames({})
    for number in range(tensors):
        shape = torch.Size(shapes[number % len(shapes)])
        local = torch.zeros(len(range(3, shape[0], world_size)), *shape[1:])
        rest: dict[str, Any] = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        names.of((str(number),), DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **rest))
    counted = sharded_files.boxes_in
    sharded_files.boxes_in = lambda *layout: calls.append(layout) or counted(*layout)  # type: ignore[func-returns-value]
    found = {}
    for save in ("first", "next"):
        parts = sharded_files.parts_of_rank(names, is_first=False)
        found[save] = len(calls), len(parts), parts[0][3], parts[1][3]
    sharded_files.boxes_in = counted
    return found


def test_a_rank_of_1024_plans_each_layout_once_and_keeps_the_plan_for_the_next_save(pool: Any) -> None:
    [found] = pool.run(planned, 1024, 300, world_size=1, group=False)
    # of (1000, 8), 1024 ranks hold a row each or none
    assert found["first"] == found["next"] == (3, 300, ((6, 0), (2, 2)), ((12,), (4,)))
