"""What only one rank knows lies beside the checkpoint, written by that rank, and each rank resumes from its own."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.callbacks._checkpoint_durability import save_new
from drivetrain.checkpoints import AsyncCheckpointIO, TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.strategies import DDPStrategy, rank_files
from drivetrain.trainer import rank_parts

STORED = Path(__file__).with_name("stored") / "two-ranks-0.1.0.ckpt"
FILE_EACH = STORED.with_name("three-ranks-a-file-each.ckpt")
MIDDLE = 6  # batches: the second of the windows of four is open


class Noisy(Dataset[Any]):
    """Samples that are augmented with each rank's and each worker's own random numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4.0) * index / 40 + torch.randn(4) + random.random()
        return x, x.sum().view(1)


class Net(LightningModule):
    """Its gradients, its dropout and its running means differ from rank to rank."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


class SaveAt(Callback):
    """Saves after so many batches of the run, and may interrupt it there."""

    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.progress.total_batches == self.batches:
            trainer.save_checkpoint(self.path)


def trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", 1)), "strategy": "ddp", "max_epochs": 2,
        "accumulate_grad_batches": 4, "num_sanity_val_steps": 0, "callbacks": [*callbacks],
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def seeded() -> None:
    torch.manual_seed(3 + rank())
    random.seed(3 + rank())


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def fitted(
    path: Path, resumes: Path | None = None, at: int = MIDDLE, workers: int = 0, epochs: int = 2
) -> tuple[Tensor, float]:
    """Train; a callback saves to ``path`` on the way, or the run resumes."""
    seeded()
    module = Net()
    ours = trainer(*([] if resumes else [SaveAt(at, path)]), max_epochs=epochs)
    start = "fork" if workers else None  # the pool's processes would start workers by a server, which is slow
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers, multiprocessing_context=start)
    ours.fit(module, loader, ckpt_path=resumes)
    return weights(module), float(ours.callback_metrics.get("loss_epoch", 0))


def names(folder: Path) -> list[str]:
    """The files in ``folder``, with their ids written as N."""
    return sorted(re.sub(r"\.[0-9a-f]{8}\.rank", ".N.rank", path.name) for path in folder.iterdir())


# ---- exact resumes, old files included -------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "workers"), [(MIDDLE, 0), (MIDDLE, 2), (10, 0), (16, 0)])
def test_each_rank_resumes_from_its_own_part(pool: Any, tmp_path: Path, at: int, workers: int) -> None:
    path = tmp_path / "a.ckpt"
    whole = pool.run(fitted, path, None, at, workers, group=False)
    assert names(tmp_path) == ["a.ckpt", "a.ckpt.N.rank1"]
    resumed = pool.run(fitted, tmp_path / "none.ckpt", path, at, workers, group=False)
    for one, other in zip(resumed, whole, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1] == other[1]


def test_a_file_of_an_earlier_version_resumes_exactly(pool: Any, tmp_path: Path) -> None:
    held = torch.load(STORED, weights_only=True)
    assert [sorted(part) for part in held["ranks"]] == [["restart", "rng"]] * 2
    whole = pool.run(fitted, tmp_path / "a.ckpt", group=False)
    resumed = pool.run(fitted, tmp_path / "none.ckpt", STORED, group=False)
    for one, other in zip(resumed, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # another machine rounds in another way
    assert torch.equal(resumed[0][0], resumed[1][0])


def test_a_file_for_each_rank_of_an_earlier_version_resumes_exactly(pool: Any, tmp_path: Path) -> None:
    held = torch.load(FILE_EACH, weights_only=True)
    assert [sorted(listed) for listed in held["rank_files"]] == [["crc32", "name", "size"]] * 2
    whole = pool.run(fitted, tmp_path / "a.ckpt", world_size=3, group=False)
    resumed = pool.run(fitted, tmp_path / "none.ckpt", FILE_EACH, world_size=3, group=False)
    for one, other in zip(resumed, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # another machine rounds in another way
    for rank in (1, 2):
        copies = tmp_path / f"without{rank}"
        copies.mkdir()
        for file in FILE_EACH.parent.glob(f"{FILE_EACH.name}*"):
            if not file.name.endswith(f".rank{rank}"):
                shutil.copy(file, copies)
        with pytest.raises(CheckpointError, match=f"rank{rank} is missing"):
            pool.run(fitted, tmp_path / "none.ckpt", copies / FILE_EACH.name, world_size=3, group=False)


# ---- one file for each machine ---------------------------------------------------------------------------------------


class OfMachines(DDPStrategy):
    """Two processes on each machine."""

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        return self._devices[:2]

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices

    @property
    def local_rank(self) -> int:
        return self.global_rank % 2

    @property
    def node_rank(self) -> int:
        return self.global_rank // 2


def on_machines(
    path: Path, resumes: Path | None = None, large: int | None = None, background: bool = False, saves: int = 1
) -> tuple[Tensor, float]:
    seeded()
    if large is not None:
        rank_files._LARGE = large
    try:
        module = Net()
        store = AsyncCheckpointIO() if background else None
        savers = [] if resumes else [SaveAt(batches, path) for batches in (2, 3)[-saves:]]  # of five
        strategy = OfMachines(checkpoint_io=store)
        ours = trainer(*savers, strategy=strategy, max_epochs=1)
        ours.fit(module, DataLoader(Noisy(), batch_size=2, shuffle=True), ckpt_path=resumes)
        return weights(module), float(ours.callback_metrics.get("loss_epoch", 0))
    finally:
        rank_files._LARGE = 2**20


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_one_rank_of_each_machine_writes_the_parts_of_all(pool: Any, tmp_path: Path, background: bool) -> None:
    path = tmp_path / "a.ckpt"
    whole = pool.run(on_machines, path, None, None, background, 2, world_size=4, group=False)
    assert names(tmp_path) == ["a.ckpt", "a.ckpt.N.rank1", "a.ckpt.N.rank2"]  # rank 2 writes for rank 3 too
    listed = torch.load(path, weights_only=True)["rank_files"]
    assert [each["ranks"] for each in listed] == [[1], [2, 3]]
    for each in listed:
        assert each["size"] == (tmp_path / each["name"]).stat().st_size
    resumed = pool.run(on_machines, tmp_path / "none.ckpt", path, world_size=4, group=False)
    for one, other in zip(resumed, whole, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1] == other[1]
    file = next(tmp_path.glob("a.ckpt.*.rank2"))
    file.unlink()
    with pytest.raises(CheckpointError, match="rank2 is missing"):
        pool.run(on_machines, tmp_path / "none.ckpt", path, world_size=4, group=False)


def test_each_rank_writes_a_large_part_itself(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    whole = pool.run(on_machines, path, None, 16, world_size=4, group=False)
    assert names(tmp_path) == ["a.ckpt", *(f"a.ckpt.N.rank{rank}" for rank in (1, 2, 3))]
    resumed = pool.run(on_machines, tmp_path / "none.ckpt", path, world_size=4, group=False)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(resumed, whole, strict=True))


def test_a_fit_of_fewer_ranks_resumes_from_the_files_of_machines(pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(on_machines, path, world_size=4, group=False)
    found = pool.run(fitted, tmp_path / "none.ckpt", path, 0, 0, 1, group=False)
    assert torch.equal(found[0][0], found[1][0])


def test_one_process_writes_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    ours = trainer(SaveAt(MIDDLE, tmp_path / "a.ckpt"), strategy="auto")
    ours.fit(module, DataLoader(Noisy(), batch_size=2))
    assert names(tmp_path) == ["a.ckpt"]
    assert not {"ranks", "rank_files"} & set(torch.load(tmp_path / "a.ckpt", weights_only=True))


# ---- how much is written and what is exchanged -----------------------------------------------------------------------


class Measured(SaveAt):
    """Writes down what the ranks exchange while a checkpoint is saved."""

    def __init__(self, batches: int, path: Path) -> None:
        super().__init__(batches, path)
        self.carried: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        world: Any = trainer.strategy.world
        verbs = ("gather_objects", "broadcast", "all_gather", "all_reduce")
        for name in verbs:
            setattr(world, name, self.measured(getattr(world, name)))
        super().on_train_batch_end(trainer)
        for name in verbs:
            delattr(world, name)

    def measured(self, verb: Any) -> Any:
        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            self.carried.append(len(pickle.dumps(value)))
            return verb(value, *args, **kwargs)

        return call


def measured(folder: Path, width: int) -> list[int]:
    seeded()
    module, saver = Net(width), Measured(MIDDLE, folder / "a.ckpt")
    data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    trainer(saver, max_epochs=1).fit(module, DataLoader(data, batch_size=2))
    return saver.carried


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_files_hold_one_set_of_gradients_a_rank_and_none_is_exchanged(
    pool: Any, tmp_path: Path, world_size: int
) -> None:
    width = 2**17
    carried = pool.run(measured, tmp_path, width, world_size=world_size, group=False)
    model = 4 * (4 * width + width + width + 1)  # bytes
    expected = model + 2 * model + world_size * model  # Adam keeps two averages
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(sizes) == world_size
    assert abs(sum(sizes.values()) - expected) < 0.05 * expected + 2**16
    for of_rank in carried:
        assert sum(of_rank) < 4096
    assert any(map(len, carried))  # the control: what is exchanged is seen


def test_the_main_file_lists_the_others(pool: Any, tmp_path: Path) -> None:
    pool.run(fitted, path := tmp_path / "a.ckpt", world_size=3, group=False)
    main = torch.load(path, weights_only=True)
    [file] = (found for found in tmp_path.iterdir() if found != path)
    [entry] = main["rank_files"]
    assert (entry["name"], entry["size"], entry["ranks"]) == (file.name, file.stat().st_size, [1, 2])
    parts = torch.load(file, weights_only=True)["parts_of_ranks"]
    assert list(parts) == ["1", "2"]
    for part in parts.values():
        assert sorted(part) == ["restart", "rng"]
        assert set(part["restart"]).isdisjoint({"samples", "exact", "settled", "loaders"})  # which all share
        assert {"exact", "loaders"} <= set(main["restart"])
    assert main["restart"]["samples"] == MIDDLE * 2 * 3  # of all ranks together
    for part in parts.values():
        assert not torch.equal(
            part["restart"]["gradients"]["net.0.weight"], main["restart"]["gradients"]["net.0.weight"]
        )


# ---- files that are missing or damaged -------------------------------------------------------------------------------


def attempt(path: Path) -> tuple[str, list[str]]:
    """Resume, and train to the end of the third epoch; the error, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="The checkpoint holds the state of callbacks")
        try:
            fitted(path.with_name("none.ckpt"), path, epochs=3)
        except CheckpointError as error:
            return str(error), []
    return "", [str(each.message) for each in caught]


def spoil(folder: Path, how: str) -> Path:
    [file] = folder.glob("*.rank1")
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("how", "message"), [("missing", "is missing"), ("cut", "bytes"), ("flipped", "its checksum is wrong")]
)
def test_inside_an_epoch_a_rank_needs_its_part(pool: Any, tmp_path: Path, how: str, message: str) -> None:
    pool.run(fitted, path := tmp_path / "a.ckpt", group=False)
    assert [error for error, _ in pool.run(attempt, path, group=False)] == ["", ""]  # the control
    file = spoil(tmp_path, how)
    for error, _ in pool.run(attempt, path, group=False):
        assert error.startswith("The checkpoint was saved inside an epoch")
        assert f"{file}" in error
        assert message in error
        assert "Put that file back beside the checkpoint" in error


def test_the_error_names_a_checkpoint_from_the_end_of_an_epoch(pool: Any, tmp_path: Path) -> None:
    pool.run(fitted, path := tmp_path / "a.ckpt", group=False)
    spoil(tmp_path, "missing")
    pool.run(epoch_saved, tmp_path, group=False)
    usable = tmp_path / "epoch=0.ckpt"
    for error, _ in pool.run(attempt, path, group=False):
        assert f"or resume from {usable}, the newest one that was saved at the end of an epoch" in error
    assert pool.run(attempt, usable, group=False) == [("", []), ("", [])]


class Counting(DDPStrategy):
    """Keeps a number that differs from rank to rank."""

    def rank_state(self, module: nn.Module) -> dict[str, Any]:
        return {**super().rank_state(module), "number": 10 + self.global_rank}


class KeepsParts(Callback):
    """Keeps what a launching process would get of the ranks."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.parts = rank_parts.of_ended_fit(trainer.current_run, trainer.strategy)


def parts_of_ended_fit(strategy: type[DDPStrategy], limits: dict[str, int]) -> list[Any]:
    kept = KeepsParts()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy(), callbacks=[kept], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **limits,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(16, 4), torch.ones(16, 1)), batch_size=2))
    return [part.get("rank_state") for part in kept.parts]


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_epochs": 2, "max_steps": 3}], ids=["end", "inside"])
def test_a_launching_process_gets_what_a_strategy_keeps_of_each_rank(pool: Any, limits: dict[str, int]) -> None:
    found = pool.run(parts_of_ended_fit, Counting, limits, group=False)
    assert found == [[{"number": 10}, {"number": 11}]] * 2
    # the control: without such a state, only a fit that has ended inside an epoch has parts
    assert pool.run(parts_of_ended_fit, DDPStrategy, limits, group=False) == [[None] * 2 * ("max_steps" in limits)] * 2


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_at_the_end_of_an_epoch_it_continues_with_a_warning(pool: Any, tmp_path: Path, how: str) -> None:
    pool.run(epoch_saved, tmp_path, group=False)
    [path] = tmp_path.glob("*.ckpt")
    file = spoil(tmp_path, how)
    outcomes = pool.run(attempt, path, group=False)
    assert [error for error, _ in outcomes] == ["", ""]
    [warning] = [text for text in outcomes[0][1] if "random state" in text]
    assert str(file) in warning
    assert "without the random state of that process" in warning


def test_who_loads_the_weights_alone_needs_the_main_file_alone(pool: Any, tmp_path: Path) -> None:
    pool.run(fitted, path := tmp_path / "a.ckpt", group=False)
    spoil(tmp_path, "missing")
    pool.run(validated, path, group=False)
    module = Net.load_from_checkpoint(path)
    assert torch.equal(weights(module), weights_in(path))


def validated(path: Path) -> None:
    ours = trainer()
    ours.validate(module := Validated(), DataLoader(Noisy(), batch_size=2), ckpt_path=path, verbose=False)
    assert torch.equal(weights(module), weights_in(path))


def weights_in(path: Path) -> Tensor:
    state = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([state[name].flatten() for name, _ in Net().named_parameters()])


# ---- removed, linked, copied, moved ----------------------------------------------------------------------------------


def epoch_saved(folder: Path, save_last: Any = None, epochs: int = 1, no_links: bool = False) -> None:
    seeded()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_last=save_last)
    with links_refused() if no_links else warnings.catch_warnings():
        trainer(saver, max_epochs=epochs, enable_checkpointing=True).fit(Net(), DataLoader(Noisy(), batch_size=2))


@contextmanager
def links_refused() -> Iterator[None]:
    made, os.symlink = os.symlink, refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os.symlink = made


def refuse(*_: Any) -> None:
    raise OSError("no links here")


@pytest.mark.parametrize("save_last", [True, "link"])
def test_the_files_of_pruned_checkpoints_go_with_them(pool: Any, tmp_path: Path, save_last: Any) -> None:
    pool.run(epoch_saved, tmp_path, save_last, 3, group=False)
    own = ["last.ckpt.N.rank1"] if save_last is True else []
    assert names(tmp_path) == ["epoch=2.ckpt", "epoch=2.ckpt.N.rank1", "last.ckpt", *own]
    for path in tmp_path.glob("*.ckpt"):
        assert pool.run(attempt, path, group=False) == [("", []), ("", [])]


def test_where_there_are_no_links_the_rank_files_are_copied_too(pool: Any, tmp_path: Path) -> None:
    pool.run(epoch_saved, tmp_path, "link", 2, True, group=False)
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=1.ckpt.N.rank1", "last.ckpt", "last.ckpt.N.rank1"]
    for path in tmp_path.glob("epoch=1.ckpt*"):
        path.unlink()
    assert pool.run(attempt, tmp_path / "last.ckpt", group=False) == [("", []), ("", [])]


@pytest.mark.parametrize("renames_all", [True, False])
def test_files_that_were_moved_together_resume(pool: Any, tmp_path: Path, renames_all: bool) -> None:
    (old := tmp_path / "old").mkdir()
    (new := tmp_path / "new").mkdir()
    whole = pool.run(fitted, old / "a.ckpt", group=False)
    for file in old.iterdir():
        renamed = file.name.replace("a.ckpt", "b.ckpt") if renames_all or file.name == "a.ckpt" else file.name
        shutil.move(file, new / renamed)
    resumed = pool.run(fitted, tmp_path / "none.ckpt", new / "b.ckpt", group=False)
    assert torch.equal(resumed[0][0], whole[0][0])


def saved_again(folder: Path) -> list[list[str]]:
    """Save twice to one path, then remove it; what lies there after each."""
    ours, found = trainer(), []
    ours.fit(Net(), DataLoader(Noisy(), batch_size=2))
    path = folder / "a.ckpt"
    for _ in range(2):
        ours.save_checkpoint(path)
        found.append(sorted(os.listdir(folder)))
        ours.strategy.barrier()
    ours.strategy.remove_checkpoint(path)
    ours.strategy.barrier()
    return [*found, sorted(os.listdir(folder))]


def test_a_second_save_replaces_all_files(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt.0badcafe.rank2").write_text("of a save that was killed, on three ranks")
    (tmp_path / "a.ckpt.notes.rank2").write_text("of somebody else")
    first, second, removed = pool.run(saved_again, tmp_path, group=False)[0]
    assert len(first) == len(second) == 3
    assert first != second
    assert removed == ["a.ckpt.notes.rank2"]


# ---- saves that fail -------------------------------------------------------------------------------------------------


def failing(folder: Path, rank_that_fails: int) -> tuple[str, list[str], list[str]]:
    ours = trainer()
    ours.fit(Net(), DataLoader(Noisy(), batch_size=2))
    ours.save_checkpoint(folder / "a.ckpt")
    before = sorted(os.listdir(folder))
    ours.strategy.barrier()
    if rank() == rank_that_fails:
        ours.strategy.checkpoint_io = Full()
    with pytest.raises(CheckpointError) as caught:
        ours.save_checkpoint(folder / "a.ckpt")
    ours.strategy.barrier()
    return str(caught.value), before, sorted(os.listdir(folder))


class Full(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise CheckpointError("the disk is full")


@pytest.mark.parametrize("fails", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_files(
    pool: Any, tmp_path: Path, fails: int
) -> None:
    for error, before, after in pool.run(failing, tmp_path, fails, group=False):
        assert "the disk is full" in error
        assert before == after
        assert len(after) == 2
    assert pool.run(attempt, tmp_path / "a.ckpt", group=False) == [("", []), ("", [])]


def killed(folder: Path, before_main: bool) -> tuple[list[str], list[str]]:
    """Save; then again, with the end of the processes before or after the main file is written; then once more."""
    ours = trainer()
    ours.fit(Net(), DataLoader(Noisy(), batch_size=2))
    path = folder / "a.ckpt"
    ours.save_checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*((ours.strategy, "save_checkpoint") if before_main else (rank_files, "commit")), died)
        with pytest.raises(KeyboardInterrupt):
            ours.save_checkpoint(path)
    ours.strategy.barrier()
    left = names(folder)
    ours.strategy.barrier()
    if rank() == 0:
        shutil.copytree(folder, folder.with_name("left"))
    ours.strategy.barrier()
    ours.save_checkpoint(path)
    return left, names(folder)


def died(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("before_main", [True, False])
def test_a_kill_between_the_files_leaves_one_whole_checkpoint(pool: Any, tmp_path: Path, before_main: bool) -> None:
    (folder := tmp_path / "run").mkdir()
    [(left, after), _] = pool.run(killed, folder, before_main, group=False)
    assert left == ["a.ckpt", "a.ckpt.N.rank1", "a.ckpt.N.rank1"]
    assert pool.run(attempt, tmp_path / "left" / "a.ckpt", group=False) == [("", []), ("", [])]
    assert after == ["a.ckpt", "a.ckpt.N.rank1"]


def saved_as_new(folder: Path) -> bool:
    ours = trainer()
    ours.fit(Net(), DataLoader(Noisy(), batch_size=2))
    return save_new(ours, str(folder / "a.ckpt"))


def test_a_file_of_another_run_keeps_its_rank_files(pool: Any, tmp_path: Path) -> None:
    theirs = ["a.ckpt", "a.ckpt.0badcafe.rank1"]
    for name in theirs:
        (tmp_path / name).write_text("another run's")
    assert pool.run(saved_as_new, tmp_path, group=False) == [False, False]
    assert sorted(os.listdir(tmp_path)) == theirs
    for name in theirs:
        (tmp_path / name).unlink()
    assert pool.run(saved_as_new, tmp_path, group=False) == [True, True]
    assert names(tmp_path) == ["a.ckpt", "a.ckpt.N.rank1"]


# ---- what a strategy keeps, and stores elsewhere ---------------------------------------------------------------------


class Keeping(DDPStrategy):
    """Remembers something on every rank."""

    kept: Any = None

    def rank_state(self, module: Any) -> dict[str, Any]:
        return {"of": self.global_rank, "tensor": torch.full((2,), float(self.global_rank))}

    def load_rank_state(self, module: Any, state: Any) -> None:
        self.kept = state


def keeping(path: Path, resumes: bool) -> Any:
    ours = trainer(strategy=Keeping(), max_epochs=1 + resumes)
    ours.fit(Net(), DataLoader(Noisy(), batch_size=2), ckpt_path=path if resumes else None)
    if not resumes:
        ours.save_checkpoint(path)
    return ours.strategy.kept  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_strategy_gets_back_what_it_kept_of_each_rank(pool: Any, tmp_path: Path, world_size: int) -> None:
    pool.run(keeping, tmp_path / "a.ckpt", False, world_size=world_size, group=False)
    for number, kept in enumerate(pool.run(keeping, tmp_path / "a.ckpt", True, world_size=world_size, group=False)):
        assert kept["of"] == number
        assert torch.equal(kept["tensor"], torch.full((2,), float(number)))


def test_what_was_kept_of_another_number_of_ranks_is_left_out_with_a_line(pool: Any, tmp_path: Path) -> None:
    pool.run(keeping, tmp_path / "a.ckpt", False, group=False)
    assert pool.run(kept_alone, tmp_path / "a.ckpt", world_size=1, group=False) == [(None, True)]


def kept_alone(path: Path) -> tuple[Any, bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = keeping(path, True)
    said = "saved by 2 processes, and there are 1: what Keeping has kept for each of them (rank_state) is left out"
    return kept, any(said in str(each.message) for each in caught)


class Elsewhere(TorchCheckpointIO):
    """A store whose paths are no local ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, path: Any) -> Path:
        assert str(path).startswith("store://")
        return self.folder / str(path).removeprefix("store://").replace("/", "_")

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, self.at(path), storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_checkpoint(self.at(path), *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(self.at(path))


def stored_elsewhere(folder: Path) -> list[list[str]]:
    ours, found = trainer(plugins=[Elsewhere(folder)]), []
    ours.fit(Net(), DataLoader(Noisy(), batch_size=2))
    for _ in range(2):
        ours.save_checkpoint("store://runs/a.ckpt")
        ours.strategy.barrier()
        found.append(sorted(os.listdir(folder)))
        ours.strategy.barrier()
    from drivetrain.trainer import checkpoint

    ours.progress.begin_run("fit")  # type: ignore[arg-type]
    loaded = checkpoint.load(ours, "store://runs/a.ckpt", None)
    checkpoint.load_own_part(ours, loaded, "store://runs/a.ckpt", None)
    assert sorted(loaded["ranks"][rank()]) == ["restart", "rng"] if rank() else loaded["ranks"][0]["rng"]
    ours.strategy.remove_checkpoint("store://runs/a.ckpt")
    ours.strategy.barrier()
    return [*found, sorted(os.listdir(folder))]


def test_a_store_that_is_not_local_gets_the_same_files(pool: Any, tmp_path: Path) -> None:
    first, second, removed = pool.run(stored_elsewhere, tmp_path, group=False)[0]
    assert [re.sub(r"\.[0-9a-f]{8}\.", ".N.", name) for name in first] == ["runs_a.ckpt", "runs_a.ckpt.N.rank1"]
    assert len(second) == 2
    assert first != second
    assert removed == []
