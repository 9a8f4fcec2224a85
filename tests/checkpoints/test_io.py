"""CheckpointIO: runs whose checkpoints are no files, runs with a store of three methods, and the defaults."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.checkpoints import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from drivetrain.checkpoints.io import newest_first, wait_for
from drivetrain.errors import CheckpointError

RUNS = "/runs of a store"  # which no test makes on the disk


class Net(LightningModule):
    def __init__(self, raise_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.raise_at = nn.Linear(2, 1), raise_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.raise_at:
            raise RuntimeError("in the middle of it")
        return nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", [0.3, 0.1, 0.2, 0.4][min(self.current_epoch, 3)])
        self.log("loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.arange(8.0).reshape(4, 2)), batch_size=2)


def trainer(folder: Any, store: CheckpointIO | None, *callbacks: Any, **arguments: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_epochs": 4, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": folder, "accelerator": "cpu", "callbacks": list(callbacks), "num_sanity_val_steps": 0,
        "enable_checkpointing": bool(callbacks), "plugins": [] if store is None else [store],
    }  # fmt: skip
    return Trainer(**{**given, **arguments})


def weights(module: LightningModule) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one: LightningModule, other: LightningModule) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def names(paths: Any) -> list[str]:
    return sorted(os.path.basename(path) for path in paths)


@pytest.fixture
def memory(own_stores: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return own_stores["MemoryIO"]()


# ---- no file at all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [True, "link"])
def test_a_run_without_files(memory: Any, tmp_path: Path, last: Any) -> None:
    saver = ModelCheckpoint(RUNS, "{epoch}", monitor="score", save_top_k=2, save_last=last)
    made, module = trainer(tmp_path, memory, saver), Net()
    made.fit(module, loader(), loader())
    assert names(memory.kept) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert saver.best_model_path == f"{RUNS}/epoch=1.ckpt"
    assert memory.load_checkpoint(saver.last_model_path)["epoch"] == (3 if last is True else 2)
    best, ends = Net(), weights(module)
    [metrics] = made.validate(best, loader(), ckpt_path="best", verbose=False)
    saved = memory.load_checkpoint(saver.best_model_path)["state_dict"]
    assert torch.equal(best.layer.weight, saved["layer.weight"])
    assert not torch.equal(best.layer.weight, ends[0])
    assert made.validate(dataloaders=loader(), verbose=False) == [metrics]  # the best one by itself
    assert made.validate(Net(), loader(), ckpt_path=f"{RUNS}/epoch=1.ckpt", verbose=False) == [metrics]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ckpt_path", ["last", f"{RUNS}/last.ckpt", f"{RUNS}/epoch=1.ckpt"])
def test_resuming_without_files_is_exact(memory: Any, tmp_path: Path, ckpt_path: str) -> None:
    whole = Net()
    trainer(tmp_path, None).fit(whole, loader(), loader())
    trainer(tmp_path, memory, ModelCheckpoint(RUNS, "{epoch}", save_last=True), max_epochs=2).fit(
        Net(), loader(), loader()
    )
    resumed = Net()
    made = trainer(tmp_path, memory, ModelCheckpoint(RUNS, "{epoch}", save_last=True))
    made.fit(resumed, loader(), loader(), ckpt_path=ckpt_path)
    assert made.global_step == 8
    assert same(resumed, whole)
    kept = ["epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]  # the one that it was resumed from stays
    assert names(memory.kept) == (kept if "epoch" in ckpt_path else kept[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_without_files_takes_no_name_of_the_first(memory: Any, tmp_path: Path) -> None:
    for _ in range(2):
        trainer(tmp_path, memory, ModelCheckpoint(RUNS, "run")).fit(Net(), loader(), loader())
    assert names(memory.kept) == ["run-v1.ckpt", "run.ckpt"]


def test_an_exception_without_files(memory: Any, tmp_path: Path) -> None:
    whole = Net()
    trainer(tmp_path, None).fit(whole, loader(), loader())
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer(tmp_path, memory, OnExceptionCheckpoint(RUNS)).fit(Net(raise_at=5), loader(), loader())
    assert names(memory.kept) == ["on_exception.ckpt"]
    resumed = Net()
    trainer(tmp_path, memory, OnExceptionCheckpoint(RUNS)).fit(resumed, loader(), loader(), ckpt_path="last")
    assert same(resumed, whole)
    assert list(tmp_path.iterdir()) == []


def test_numbered_checkpoints_without_files(memory: Any, tmp_path: Path) -> None:
    first = trainer(tmp_path, memory, max_epochs=1)
    first.fit(Net(), loader(), loader())
    for number in (2, 10):
        first.save_checkpoint(tmp_path / f"hpc_ckpt_{number}.ckpt")
    second = trainer(tmp_path, memory)
    second.fit(Net(), loader(), loader(), ckpt_path="hpc")
    assert second.ckpt_path == str(tmp_path / "hpc_ckpt_10.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_last_one_that_is_gone_without_files(memory: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(RUNS, "{epoch}", save_top_k=-1, save_last=True)
    made = trainer(tmp_path, memory, saver)
    made.fit(Net(), loader(), loader())
    memory.remove_checkpoint(f"{RUNS}/last.ckpt")
    memory.kept[f"{RUNS}/epoch=3.ckpt"] = memory.kept[f"{RUNS}/epoch=3.ckpt"][:-100]
    with pytest.warns(UserWarning, match=r"last\.ckpt is gone.*complete checkpoint is taken: .*epoch=2\.ckpt"):
        made.validate(Net(), loader(), ckpt_path="last", verbose=False)


def test_what_a_store_does_not_have_is_named(memory: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(RUNS, "{epoch}")
    made = trainer(tmp_path, memory, saver)
    made.fit(Net(), loader(), loader())
    memory.kept.clear()
    with pytest.raises(CheckpointError, match=r'"best" means .*epoch=3\.ckpt.*that file is gone'):
        made.validate(Net(), loader(), ckpt_path="best")
    with pytest.raises(CheckpointError, match="There is no checkpoint at /elsewhere"):
        made.validate(Net(), loader(), ckpt_path="/elsewhere")


def test_a_store_that_does_not_say_what_it_has(own_stores: dict[str, Any], tmp_path: Path) -> None:
    """The control: without ``written_at`` and ``find`` the questions go to the local file system."""

    class Silent(own_stores["MemoryIO"]):  # type: ignore[misc]
        written_at, find = CheckpointIO.written_at, CheckpointIO.find

        def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: Any = None) -> Any:
            raise AssertionError("nothing is found")

    made = trainer(tmp_path, Silent(), ModelCheckpoint(RUNS))
    made.fit(Net(), loader(), loader())
    with pytest.raises(CheckpointError, match="that file is gone"):
        made.validate(Net(), loader(), ckpt_path="best")


# ---- three methods ---------------------------------------------------------------------------------------------------


class Familiar(CheckpointIO):
    """What programs of the field define: no constructor, no other method, and a file of any form."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"wrapped": dict(checkpoint)}, path)

    def load_checkpoint(self, path: Any, map_location: Any = None) -> Any:  # type: ignore[override]
        return torch.load(path, map_location=map_location, weights_only=True)["wrapped"]

    def remove_checkpoint(self, path: Any) -> None:
        os.remove(path)


@pytest.mark.parametrize("last", [True, "link"])
def test_a_store_of_three_methods(tmp_path: Path, last: Any) -> None:
    whole = Net()
    trainer(tmp_path, None).fit(whole, loader(), loader())
    runs = tmp_path / "runs"
    saver = ModelCheckpoint(runs, "{epoch}", monitor="score", save_top_k=2, save_last=last)
    trainer(tmp_path, Familiar(), saver, max_epochs=2).fit(Net(), loader(), loader())
    assert names(runs.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (runs / "last.ckpt").is_symlink() is (last == "link")
    resumed = Net()
    saver = ModelCheckpoint(runs, "{epoch}", monitor="score", save_top_k=2, save_last=last)
    made = trainer(tmp_path, Familiar(), saver)
    made.fit(resumed, loader(), loader(), ckpt_path="last")
    assert same(resumed, whole)
    assert names(runs.iterdir()) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert names([saver.best_model_path]) == ["epoch=1.ckpt"]
    made.validate(Net(), loader(), ckpt_path="best", verbose=False)
    assert torch.load(saver.best_model_path, weights_only=True)["wrapped"]["epoch"] == 1


# ---- the defaults ----------------------------------------------------------------------------------------------------


def test_what_the_defaults_say_of_local_files(tmp_path: Path) -> None:
    store = Familiar()
    path = str(tmp_path / "a.ckpt")
    assert store.written_at(path) is None
    assert not store.exists(path)
    assert not store.exists("a\0b")
    assert store.find(tmp_path / "none", "*") == []
    store.save_checkpoint({"a": 1}, path)
    (tmp_path / "b.ckpt").symlink_to("gone")
    os.utime(path, (100, 200))
    assert store.written_at(path) == 200
    store.touch(path)
    assert (store.written_at(path) or 0) > 200
    assert store.exists(path)
    assert sorted(store.find(str(tmp_path), "*.ckpt")) == [path, str(tmp_path / "b.ckpt")]  # links to nothing too
    assert (store.link_target(path), store.link_target(tmp_path / "b.ckpt")) == (None, "gone")
    assert store.is_complete(path)
    assert not store.is_complete(tmp_path / "b.ckpt")
    assert store.is_durable(path)
    store.wait(path)
    store.wait()
    store.teardown()
    assert newest_first(store, [str(tmp_path / "b.ckpt"), path]) == [path, str(tmp_path / "b.ckpt")]


def test_what_the_defaults_say_of_shards_and_of_other_programs(tmp_path: Path) -> None:
    store = Familiar()
    assert not store.is_sharded(tmp_path)
    with store.new_files() as refused:
        store.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
        store.save_checkpoint({"a": 2}, tmp_path / "a.ckpt")
        assert not store.was_refused(tmp_path / "a.ckpt")
    assert refused == []
    assert store.load_checkpoint(tmp_path / "a.ckpt") == {"a": 2}


def test_a_store_of_ones_own_may_leave_the_file_of_another_program(tmp_path: Path) -> None:
    class Careful(Familiar):
        refused: list[str] | None = None

        @contextmanager
        def new_files(self) -> Iterator[list[str]]:
            self.refused = []
            try:
                yield self.refused
            finally:
                self.refused = None

        def was_refused(self, path: Any) -> bool:
            return self.refused is not None and str(path) in self.refused

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            if self.refused is not None and Path(path).name == "epoch=0.ckpt":  # another program was faster
                self.refused.append(str(path))
            else:
                super().save_checkpoint(checkpoint, path)

    saver = ModelCheckpoint(tmp_path / "runs", "{epoch}")
    trainer(tmp_path, Careful(), saver, max_epochs=1).fit(Net(), loader(), loader())
    assert names([saver.best_model_path]) == names((tmp_path / "runs").iterdir()) == ["epoch=0-v1.ckpt"]


def test_a_store_that_writes_in_a_thread_knows_the_shards_of_the_one_behind_it(tmp_path: Path) -> None:
    class Folders(Familiar):
        def is_sharded(self, path: Any) -> bool:
            return Path(path).is_dir()

    assert AsyncCheckpointIO(Folders()).is_sharded(tmp_path)
    assert not AsyncCheckpointIO(Familiar()).is_sharded(tmp_path)


@pytest.mark.parametrize("link", [False, True])
def test_a_copy_of_a_local_file(tmp_path: Path, link: bool) -> None:
    store = TorchCheckpointIO()
    source, path = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    store.save_checkpoint({"a": 1}, source)
    assert store.copy(source, path, link=link)
    assert path.is_symlink() is link
    assert store.load_checkpoint(path) == {"a": 1}
    path.unlink()
    path.write_text("theirs")
    assert not store.copy(source, path, link=link, replaces=False)
    assert path.read_text() == "theirs"
    assert store.copy(source, path, link=link)
    assert store.load_checkpoint(path) == {"a": 1}
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=f"could not become a {'link to' if link else 'copy of'} .*a.ckpt"):
        store.copy(source, tmp_path / "folder", link=link)
    assert names(tmp_path.iterdir()) == ["a.ckpt", "b.ckpt", "folder"]


def test_a_copy_without_files_replaces_nothing_unless_it_may(memory: Any) -> None:
    for path, value in (("a.ckpt", 1), ("b.ckpt", 2)):
        memory.save_checkpoint({"value": value}, path)
    assert not memory.copy("a.ckpt", "b.ckpt", replaces=False)
    assert memory.load_checkpoint("b.ckpt") == {"value": 2}
    assert memory.copy("a.ckpt", "b.ckpt")
    assert memory.copy("a.ckpt", "c.ckpt", replaces=False)
    assert [memory.load_checkpoint(path)["value"] for path in ("b.ckpt", "c.ckpt")] == [1, 1]


def test_a_copy_waits_for_what_it_copies(tmp_path: Path) -> None:
    class Late(TorchCheckpointIO):
        """Writes when somebody waits."""

        later: Any = None

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.later = (checkpoint, path)

        def wait(self, path: Any = None) -> None:
            super().save_checkpoint(*self.later)

    store = Late()
    store.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    assert store.copy(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert store.load_checkpoint(tmp_path / "b.ckpt") == {"a": 1}


def test_what_a_failed_wait_raises_names_the_file() -> None:
    class Failing(Familiar):
        error: Exception

        def wait(self, path: Any = None) -> None:
            raise self.error

    store = Failing()
    store.error = OSError("disk full")
    with pytest.raises(CheckpointError, match=r"The checkpoint a\.ckpt was not written: disk full\. ") as caught:
        wait_for(store, "a.ckpt")
    assert caught.value.__cause__ is store.error
    store.error = CheckpointError("a.ckpt: disk full")
    with pytest.raises(CheckpointError) as caught:
        wait_for(store, "a.ckpt")
    assert caught.value is store.error


# ---- the life of a store ---------------------------------------------------------------------------------------------


class Recording(TorchCheckpointIO):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(f"save {Path(path).name}")
        super().save_checkpoint(checkpoint, path)

    def wait(self, path: Any = None) -> None:
        self.calls.append("wait" if path is None else f"wait {Path(path).name}")

    def teardown(self) -> None:
        self.calls.append("teardown")


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_run_waits_and_tears_down(tmp_path: Path, fails: bool) -> None:
    class SavesAfterwards(Callback):
        def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            trainer.save_checkpoint(tmp_path / "late.ckpt")

    store = Recording()
    made = trainer(tmp_path, store, SavesAfterwards(), enable_checkpointing=False, max_epochs=1)
    try:
        made.fit(Net(raise_at=1 if fails else -1), loader(), loader())
    except RuntimeError:
        assert fails
    assert store.calls == ["wait", "teardown"] + ([] if fails else ["wait late.ckpt", "save late.ckpt", "wait"])


def test_an_engine_waits_before_it_loads(tmp_path: Path) -> None:
    store = Recording()
    engine = Engine(accelerator="cpu", plugins=[store])
    engine.save(tmp_path / "a.ckpt", {"a": 1})
    engine.load(tmp_path / "a.ckpt")
    engine.load_raw(tmp_path / "a.ckpt", nn.Module(), strict=False)
    assert store.calls == ["wait a.ckpt", "save a.ckpt", "wait a.ckpt", "wait a.ckpt"]
    engine.teardown()
    assert store.calls[4:] == ["wait", "teardown"]


def test_a_copy_of_what_could_not_be_written_names_the_file(tmp_path: Path) -> None:
    class Burning(TorchCheckpointIO):
        def wait(self, path: Any = None) -> None:
            raise OSError("disk on fire")

    with pytest.raises(CheckpointError, match=r"The checkpoint .*a\.ckpt was not written: disk on fire"):
        Burning().copy(tmp_path / "a.ckpt", tmp_path / "b.ckpt")


def test_of_checkpoints_of_the_same_second_the_later_name_is_the_newest() -> None:
    class Seconds(TorchCheckpointIO):
        def written_at(self, path: Any) -> float | None:
            return None if "gone" in str(path) else 1.0 + ("new" in str(path))

    paths = ["a/epoch=9.ckpt", "a/gone.ckpt", "a/new.ckpt", "a/epoch=10.ckpt", "a/last.ckpt", "a/last-v1.ckpt"]
    assert newest_first(Seconds(), paths) == [
        "a/new.ckpt", "a/last-v1.ckpt", "a/last.ckpt", "a/epoch=10.ckpt", "a/epoch=9.ckpt", "a/gone.ckpt",
    ]  # fmt: skip


class Own(CheckpointIO):
    """A store as programs have it that write to a bucket by themselves; it answers no questions."""

    def save_checkpoint(self, checkpoint: Any, path: str | Path, storage_options: Any = None) -> None:
        with fsspec.open(str(path), "wb") as stream:
            torch.save(dict(checkpoint), stream)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        with fsspec.open(str(path), "rb") as stream:
            return torch.load(stream, map_location, weights_only=weights_only is not False)

    def remove_checkpoint(self, path: str | Path) -> None:
        fsspec.core.url_to_fs(str(path))[0].rm(str(path))


def test_a_store_with_three_methods_is_answered_for_at_addresses(tmp_path: Path) -> None:
    folder, store = f"memory://{uuid.uuid4().hex}", Own()
    assert store.find(folder, "*.ckpt") == []
    for epochs in (2, 3):
        saver = ModelCheckpoint(folder, save_last=True)
        trainer(tmp_path, store, saver, max_epochs=epochs).fit(Net(), loader(), loader(), ckpt_path="last")
    assert len(store.find(folder, "*.ckpt")) == 2
    assert store.load_checkpoint(f"{folder}/last.ckpt")["global_step"] == 3 * 2
    assert os.listdir(tmp_path) == []


def test_addresses_that_only_a_store_knows_are_its_own() -> None:
    assert (Own().find("store://a", "*"), Own().exists("store://a/b")) == ([], False)
