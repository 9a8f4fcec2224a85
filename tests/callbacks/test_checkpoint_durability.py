"""ModelCheckpoint with a store that writes in the background: what waits until a file is durable, and what fails."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.loggers import DummyLogger


class Net(LightningModule):
    def __init__(self, raise_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.raise_at = nn.Linear(1, 1), raise_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.raise_at:
            raise RuntimeError("in the middle of it")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Looks(Callback):
    """Calls ``look`` with the Trainer in the first batch of epoch ``epoch``."""

    def __init__(self, look: Callable[[Trainer], None], epoch: int = 2) -> None:
        self.look, self.epoch, self.looked = look, epoch, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.epoch:
            self.looked += 1
            self.look(trainer)


@pytest.fixture
def gated(own_stores: dict[str, Any]) -> Any:
    """The store of docs/own_store.md; it holds some writes back until they are released, and some fail."""

    class Gated(own_stores["BackgroundIO"]):  # type: ignore[misc]
        def __init__(self, *held: str, fails: str = "") -> None:
            super().__init__()
            self.gates = {name: threading.Event() for name in held}
            self.fails, self.waited = fails, list[str]()

        def begin(self, path: Any, function: Any, *args: Any) -> None:
            name = Path(path).name

            def write() -> None:
                assert name not in self.gates or self.gates[name].wait(10)
                if name == self.fails:
                    raise OSError("disk full")
                function(*args)

            super().begin(path, write)

        def wait(self, path: Any = None) -> None:
            """Release what somebody waits for: nothing hangs, and what is written was waited for."""
            for name in self.writes if path is None else {str(path)} & set(self.writes):
                gate = self.gates.get(Path(name).name)
                if gate is not None and not gate.is_set():
                    self.waited.append(Path(name).name)
                    gate.set()
            super().wait(path)

    return Gated


class Careless(TorchCheckpointIO):
    """The control: it returns before it has written, and does not say so."""

    later: Any = None

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if self.later is not None:
            super().save_checkpoint(*self.later)
        self.later = (checkpoint, path)


def fit(
    folder: Path, store: Any, *callbacks: Callback, ckpt_path: Any = None, raise_at: int = -1, **more: Any
) -> Trainer:
    given: dict[str, Any] = {
        "max_epochs": 3, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": folder, "accelerator": "cpu", "callbacks": list(callbacks), "plugins": [store],
    }  # fmt: skip
    made = Trainer(**{**given, **more})
    data = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    made.fit(Net(raise_at), data, ckpt_path=ckpt_path)
    return made


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.suffix == ".ckpt")


def epoch_of(path: Any) -> int:
    return int(TorchCheckpointIO().load_checkpoint(path)["epoch"])


def base(path: str) -> str:
    return os.path.basename(path)


# ---- pruning ---------------------------------------------------------------------------------------------------------


def test_an_old_file_stays_until_the_new_one_is_durable(gated: Any, tmp_path: Path) -> None:
    saver, store = ModelCheckpoint(tmp_path, "{epoch}"), gated("epoch=1.ckpt")

    def look(trainer: Trainer) -> None:
        assert not store.gates["epoch=1.ckpt"].is_set()  # training has gone on meanwhile
        assert files(tmp_path) == ["epoch=0.ckpt"]
        assert base(saver.best_model_path) == "epoch=0.ckpt"
        assert list(map(base, saver.best_k_models)) == ["epoch=0.ckpt"]

    looks = Looks(look)
    fit(tmp_path, store, saver, looks)
    assert looks.looked == 2
    assert store.waited == ["epoch=1.ckpt"]  # by the next save
    assert files(tmp_path) == ["epoch=2.ckpt"]
    assert list(map(base, saver.best_k_models)) == [base(saver.best_model_path)] == ["epoch=2.ckpt"]
    assert epoch_of(saver.best_model_path) == 2


def test_a_store_that_does_not_say_when_loses_the_old_file(tmp_path: Path) -> None:
    """The control of the test above, and of the one below."""
    saver, seen = ModelCheckpoint(tmp_path, "{epoch}"), list[str]()
    fit(
        tmp_path, Careless(), saver, Looks(lambda trainer: seen.extend([*files(tmp_path), base(saver.best_model_path)]))
    )
    assert seen[:1] == ["epoch=1.ckpt"]
    assert seen.count("epoch=0.ckpt") == 0


@pytest.mark.parametrize("last", [None, True, "link"])
def test_a_run_that_is_killed_before_a_file_is_durable_leaves_the_old_one(
    gated: Any, tmp_path: Path, last: Any
) -> None:
    runs, left = tmp_path / "runs", tmp_path / "left"
    store = gated("epoch=1.ckpt")
    kill = Looks(lambda trainer: None if left.exists() else shutil.copytree(runs, left, symlinks=True) and None)
    fit(tmp_path, store, ModelCheckpoint(runs, "{epoch}", save_last=last), kill)
    assert files(left) == ["epoch=0.ckpt", *(["last.ckpt"] if last else [])]
    assert epoch_of(left / "epoch=0.ckpt") == 0
    if last:
        assert epoch_of(left / "last.ckpt") == 0
        shutil.rmtree(runs)
        left.rename(runs)
        saver = ModelCheckpoint(runs, "{epoch}", save_last=last)
        resumed = fit(tmp_path, gated(), saver, ckpt_path="last")
        assert resumed.ckpt_path == str(runs / "last.ckpt")
        assert resumed.global_step == 6
        assert files(runs) == ["epoch=2.ckpt", "last.ckpt"]


def test_all_that_were_kept_are_removed_once_they_may_be(gated: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    store = gated("epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt")
    fit(tmp_path, store, saver)
    assert store.waited == files(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    assert len(saver.best_k_models) == 3


def test_a_name_that_is_being_written_is_not_free(gated: Any, tmp_path: Path) -> None:
    """Two callbacks in one folder, whose files would have the same name."""
    savers = [ModelCheckpoint(tmp_path, "run"), ModelCheckpoint(tmp_path, "run", mode="max")]
    fit(tmp_path, gated("run.ckpt", "run-v1.ckpt"), *savers, max_epochs=1)
    assert [base(saver.best_model_path) for saver in savers] == ["run.ckpt", "run-v1.ckpt"]
    assert files(tmp_path) == ["run-v1.ckpt", "run.ckpt"]


def test_a_save_waits_for_one_to_the_same_path(gated: Any, tmp_path: Path) -> None:
    store, waited = gated("own.ckpt"), list[list[str]]()

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            waited.append(store.waited.copy())
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            waited.append(store.waited.copy())

    fit(tmp_path, store, Saves(), enable_checkpointing=False, max_epochs=2)
    assert waited == [[], [], [], ["own.ckpt"]]
    assert epoch_of(tmp_path / "own.ckpt") == 1


def test_the_rank_files_of_an_old_file_stay_until_the_new_one_is_durable(gated: Any, tmp_path: Path) -> None:
    """A run of two processes has left them."""
    there, old = list[bool](), tmp_path / "own.ckpt.0123abcd.rank1"
    old.touch()

    def save(trainer: Trainer) -> None:
        if not there:
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            there.append(old.exists())

    made = fit(tmp_path, gated("own.ckpt"), Looks(save, epoch=0), enable_checkpointing=False, max_epochs=1)
    assert there == [True]
    made.save_checkpoint(tmp_path / "own.ckpt")
    assert not old.exists()


# ---- the last one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [True, "link"])
def test_the_last_one_moves_as_soon_as_the_new_file_is_durable(gated: Any, tmp_path: Path, last: Any) -> None:
    saver, store = ModelCheckpoint(tmp_path, "{epoch}", save_last=last), gated("epoch=1.ckpt")

    def look(trainer: Trainer) -> None:
        if not store.gates["epoch=1.ckpt"].is_set():
            assert epoch_of(tmp_path / "last.ckpt") == 0
            store.gates["epoch=1.ckpt"].set()
            store.writes[str(tmp_path / "last.ckpt")].result()  # the store does it: no callback has run
            assert epoch_of(tmp_path / "last.ckpt") == 1
            assert base(saver.best_model_path) == "epoch=0.ckpt"

    looks = Looks(look)
    fit(tmp_path, store, saver, looks)
    assert looks.looked == 2
    assert files(tmp_path) == ["epoch=2.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink() is (last == "link")
    assert epoch_of(saver.last_model_path) == 2


def test_a_last_one_without_a_ranked_one(gated: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
    saver.CHECKPOINT_NAME_LAST = "last-{epoch}"
    store = gated("last-epoch=1.ckpt")
    seen: list[list[str]] = []
    fit(tmp_path, store, saver, Looks(lambda trainer: seen.append(files(tmp_path))))
    assert seen[0] == ["last-epoch=0.ckpt"]
    assert files(tmp_path) == ["last-epoch=2.ckpt"]
    assert base(saver.last_model_path) == "last-epoch=2.ckpt"


def test_a_last_one_of_another_run_stays(gated: Any, tmp_path: Path) -> None:
    for name, expected in (("last", ["last"]), ("last-v1", ["last", "last-v1"])):
        saver = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
        fit(tmp_path, gated("last.ckpt", "last-v1.ckpt"), saver)
        assert base(saver.last_model_path) == f"{name}.ckpt"
        assert sorted(file.removesuffix(".ckpt") for file in files(tmp_path)) == expected


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [None, True, "link"])
@pytest.mark.parametrize(("epoch", "steps"), [(1, 6), (2, 6)], ids=["at the next save", "at the end"])
def test_a_write_that_fails_ends_the_fit_and_loses_nothing(
    gated: Any, tmp_path: Path, epoch: int, steps: int, last: Any
) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_last=last)
    store = gated(fails=f"epoch={epoch}.ckpt")
    with pytest.raises(CheckpointError, match=rf"The checkpoint .*epoch={epoch}\.ckpt was not written: disk full"):
        fit(tmp_path, store, saver)
    assert files(tmp_path) == [f"epoch={epoch - 1}.ckpt", *(["last.ckpt"] if last else [])]
    assert base(saver.best_model_path) == f"epoch={epoch - 1}.ckpt"
    assert list(map(base, saver.best_k_models)) == [f"epoch={epoch - 1}.ckpt"]
    assert epoch_of(saver.best_model_path) == epoch - 1
    assert epoch_of(saver.last_model_path or saver.best_model_path) == epoch - 1


def test_the_first_write_fails(gated: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_last=True)
    saver.CHECKPOINT_NAME_LAST = "last-{epoch}"
    with pytest.raises(CheckpointError, match=r"epoch=0\.ckpt was not written"):
        fit(tmp_path, gated(fails="epoch=0.ckpt"), saver)
    assert files(tmp_path) == []
    assert (saver.best_model_path, saver.last_model_path, saver.best_k_models) == ("", "", {})


def test_a_save_of_ones_own_that_fails_ends_the_run(gated: Any, tmp_path: Path) -> None:
    def save(trainer: Trainer) -> None:
        if trainer.progress.batch_idx == 0:
            trainer.save_checkpoint(tmp_path / "own.ckpt")

    (tmp_path / "own.ckpt").mkdir()
    with pytest.raises(CheckpointError, match=r"own\.ckpt could not be written: a folder has this name"):
        fit(tmp_path, gated(), Looks(save), enable_checkpointing=False)


def test_a_save_outside_of_a_run_waits(gated: Any, tmp_path: Path) -> None:
    made = fit(tmp_path, store := gated("own.ckpt"), enable_checkpointing=False)
    made.save_checkpoint(tmp_path / "own.ckpt")
    assert store.waited == files(tmp_path) == ["own.ckpt"]
    store.fails = "own.ckpt"
    with pytest.raises(CheckpointError, match=r"own\.ckpt was not written: disk full"):
        made.save_checkpoint(tmp_path / "own.ckpt")
    assert epoch_of(tmp_path / "own.ckpt") == 3


# ---- exceptions ------------------------------------------------------------------------------------------------------


def test_an_exception_while_a_save_is_under_way(gated: Any, tmp_path: Path) -> None:
    saver, store = ModelCheckpoint(tmp_path, "{epoch}"), gated("epoch=1.ckpt")
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(tmp_path, store, saver, raise_at=5)
    assert store.waited == files(tmp_path) == [base(saver.best_model_path)] == ["epoch=1.ckpt"]


def test_an_exception_while_a_save_fails(gated: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_on_exception=True)
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        pytest.warns(UserWarning, match=r"epoch=1\.ckpt was not written: disk full"),
    ):
        fit(tmp_path, gated(fails="epoch=1.ckpt"), saver, raise_at=5)
    assert files(tmp_path) == ["epoch=0.ckpt", "epoch=2.ckpt"]
    assert base(saver.best_model_path) == "epoch=0.ckpt"


def test_an_exception_checkpoint_is_durable_when_it_is_announced(
    gated: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = gated("on_exception.ckpt")
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(tmp_path, store, OnExceptionCheckpoint(tmp_path), raise_at=5)
    assert store.waited == files(tmp_path) == ["on_exception.ckpt"]


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_loggers_and_log_learn_of_a_file_when_it_is_durable(
    gated: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    class Uploads(DummyLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            seen.append(
                f"{base(checkpoint_callback.best_model_path)}: {os.path.exists(checkpoint_callback.best_model_path)}"
            )

    saver = ModelCheckpoint(tmp_path, "{epoch}", verbose=True)
    with caplog.at_level("INFO"):
        fit(tmp_path, gated("epoch=1.ckpt"), saver, logger=Uploads())
    assert seen == [f"epoch={epoch}.ckpt: True" for epoch in range(3)]
    said = [record.message for record in caplog.records if "saved" in record.message]
    assert said == [f"Epoch {n}, step {2 * n + 2}: saved {tmp_path}/epoch={n}.ckpt." for n in range(3)]


def test_a_fit_that_is_resumed_knows_what_was_under_way(gated: Any, tmp_path: Path) -> None:
    """The file itself says that it is the best one, though the callback did not when it was made."""
    fit(tmp_path, gated(), ModelCheckpoint(tmp_path, "{epoch}"), max_epochs=1)
    saver = ModelCheckpoint(tmp_path, "{epoch}")
    fit(tmp_path, gated(), saver, ckpt_path=tmp_path / "epoch=0.ckpt", max_epochs=2)
    assert files(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt"]  # the one that it was resumed from stays
    assert list(map(base, saver.best_k_models)) == ["epoch=1.ckpt"]
