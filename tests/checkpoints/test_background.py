"""AsyncCheckpointIO: what a save copies, when it is durable, how it fails, and a run that uses it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO, arena, background, container, writer
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.plugins import AsyncCheckpointIO


class Slow(TorchCheckpointIO):
    """Writes when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write, self.fails = threading.Event(), False

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.may_write.wait(30)
        if self.fails:
            raise ValueError("out of tape")
        super().save_checkpoint(checkpoint, path, storage_options)


class Keeps(TorchCheckpointIO):
    """Writes nothing, and keeps what it should write."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.kept.append(checkpoint)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.tied = self.layer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(folder: Path, epochs: int, *plugins: Any, save_last: Any = True, **options: Any) -> Net:
    net = Net()
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=list(plugins), callbacks=[ModelCheckpoint(folder, save_last=save_last)],
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(torch.arange(8.0).reshape(4, 2)), batch_size=2), **options)
    return net


def test_a_save_returns_before_it_is_written_and_holds_the_values_of_that_moment(tmp_path: Path) -> None:
    inner = Slow()
    store, weight, path = AsyncCheckpointIO(inner), torch.ones(2), tmp_path / "a.ckpt"
    store.save_checkpoint({"weight": weight, "again": weight.view(2), "rest": [1, {"name": "x"}]}, path)
    weight.zero_()  # training goes on
    assert not store.is_durable(path)
    assert not store.exists(path)
    inner.may_write.set()
    store.wait(path)
    assert store.is_durable(path)
    found = store.load_checkpoint(path)
    assert torch.equal(found["weight"], torch.ones(2))
    assert found["rest"] == [1, {"name": "x"}]
    assert found["weight"].data_ptr() == found["again"].data_ptr()  # shared there as well
    store.teardown()


def test_a_copy_of_a_checkpoint_that_is_being_written_follows_it(tmp_path: Path) -> None:
    inner = Slow()
    store, path, last = AsyncCheckpointIO(inner), tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    store.save_checkpoint({"step": 3}, path)
    assert store.copy(path, last)
    assert not last.exists()
    inner.may_write.set()
    store.wait()
    assert store.load_checkpoint(last)["step"] == 3
    assert not store.copy(path, last, replaces=False)
    store.remove_checkpoint(path)
    assert store.find(tmp_path, "*.ckpt") == [str(last)]
    store.teardown()


def test_a_run_waits_with_its_names_until_another_runs_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, lines = Slow(), list[str]()
    first, second, path = AsyncCheckpointIO(inner), AsyncCheckpointIO(), tmp_path / "a.ckpt"

    def logged(line: str) -> None:
        lines.append(line)
        inner.may_write.set()

    monkeypatch.setattr(background, "any_rank_info", logged)
    with first.alone_in(tmp_path):
        first.save_checkpoint({"run": 1}, path)
    with second.alone_in(tmp_path):
        found = second.exists(path)
    inner.may_write.set()
    for store in (first, second):
        store.wait()
        store.teardown()
    assert found
    assert lines == [
        f"Training waits while another run writes a checkpoint to {tmp_path}. Give each run a folder of its own."
    ]


@pytest.mark.parametrize("save_last", [True, "link"])
def test_two_runs_that_save_at_the_same_time_replace_no_file_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_last: Any
) -> None:
    """The other run has chosen its names before this one, and writes them after this one is ready to save."""
    names = ["epoch=0-step=2.ckpt", "last.ckpt"]
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)

    def write(line: str) -> None:
        if "another run" in line:
            for name in names:
                (tmp_path / name).write_text("of the other")
            os.close(handle)

    monkeypatch.setattr(background, "any_rank_info", write)
    fit(tmp_path, 1, AsyncCheckpointIO(), save_last=save_last)
    assert [(tmp_path / name).read_text() for name in names] == ["of the other"] * 2
    for name in ("epoch=0-step=2-v1.ckpt", "last-v1.ckpt"):
        assert TorchCheckpointIO().load_checkpoint(tmp_path / name)["global_step"] == 2


@pytest.mark.parametrize("kind", [TorchCheckpointIO, Slow])
def test_a_new_file_does_not_replace_one_that_another_run_has_written_meanwhile(tmp_path: Path, kind: Any) -> None:
    """As where the file system has no locks, or the other run saves without this store."""
    store, path = AsyncCheckpointIO(inner := kind()), tmp_path / "a.ckpt"
    if kind is Slow:
        inner.may_write.set()
    path.write_text("of the other")
    with store.new_files():
        store.save_checkpoint({"step": 3}, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt was not written, because another run .* a folder of its own"):
        store.wait()
    assert path.read_text() == "of the other"
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]
    store.save_checkpoint({"step": 4}, path)  # a name that the program has chosen
    store.wait()
    assert store.load_checkpoint(path) == {"step": 4}
    store.teardown()


def test_a_copy_does_not_replace_a_file_that_another_run_has_written_meanwhile(tmp_path: Path) -> None:
    inner = Slow()
    store, path, last = AsyncCheckpointIO(inner), tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    store.save_checkpoint({"step": 3}, path)
    assert store.copy(path, last, replaces=False)
    last.write_text("of the other")
    inner.may_write.set()
    with pytest.raises(CheckpointError, match=r"last\.ckpt was not written, because another run"):
        store.wait()
    assert last.read_text() == "of the other"
    store.teardown()


def test_a_failed_write_is_raised_once_and_names_the_file(tmp_path: Path) -> None:
    inner = Slow()
    inner.fails = True
    inner.may_write.set()
    store, path = AsyncCheckpointIO(inner), tmp_path / "a.ckpt"
    store.save_checkpoint({}, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt could not be written: ValueError: out of tape.*Check Slow"):
        store.wait(path)
    store.wait(path)
    store.teardown()


def test_a_run_with_it_writes_and_resumes_as_one_without(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", 3)
    fit(tmp_path / "async", 2, AsyncCheckpointIO())
    resumed = fit(tmp_path / "async", 3, AsyncCheckpointIO(TorchCheckpointIO()), ckpt_path="last")
    assert sorted(each.name for each in (tmp_path / "async").iterdir()) == ["epoch=2-step=6.ckpt", "last.ckpt"]
    assert torch.equal(resumed.layer.weight, plain.layer.weight)
    assert not torch.equal(plain.layer.weight, Net().layer.weight)


def test_a_checkpoint_without_tensors_is_saved(tmp_path: Path) -> None:
    store = AsyncCheckpointIO()
    store.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
    store.wait()
    assert store.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}
    store.teardown()


def test_the_connection_to_a_process_that_has_died_is_closed(tmp_path: Path) -> None:
    store = AsyncCheckpointIO()
    store.start()
    assert store._writer is not None
    process, connection = store._writer._process, store._writer._connection
    process.kill()
    store.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
    store.wait()
    assert store.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}
    assert connection.closed
    assert process.returncode == -signal.SIGKILL
    store.teardown()


def test_it_can_be_pickled_and_wants_a_store() -> None:
    store = pickle.loads(pickle.dumps(AsyncCheckpointIO()))
    assert isinstance(store.checkpoint_io, TorchCheckpointIO)
    with pytest.raises(ConfigurationError, match="TorchCheckpointIO"):
        AsyncCheckpointIO("files")  # type: ignore[arg-type]


def saved(store: AsyncCheckpointIO, path: Path, value: float) -> None:
    store.save_checkpoint({"weight": torch.full((1000,), value)}, path)
    store.wait(path)
    assert store.load_checkpoint(path)["weight"].eq(value).all()


def test_a_process_writes_and_is_started_with_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []

    class Watched(AsyncCheckpointIO):
        def start(self) -> None:
            super().start()
            started.append(self._writer is not None)

    class Asks(Net):
        def on_train_start(self) -> None:
            assert started == [True]

    store = Watched()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[store], callbacks=[ModelCheckpoint(tmp_path)],
    )  # fmt: skip
    trainer.fit(Asks(), DataLoader(TensorDataset(torch.arange(8.0).reshape(4, 2)), batch_size=2))
    assert len(started) == 2  # and once by the save, which finds it
    assert store._writer is None  # ended with the run


def test_if_the_process_dies_this_one_writes_and_a_line_says_so(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    store = AsyncCheckpointIO()
    saved(store, tmp_path / "a.ckpt", 1.0)
    first = store._writer
    assert first is not None
    first._process.kill()
    saved(store, tmp_path / "b.ckpt", 2.0)
    assert f"ended by SIGKILL, which the system also sends when memory runs out. This process writes {tmp_path}" in (
        caplog.text
    )
    saved(store, tmp_path / "c.ckpt", 3.0)
    assert store._writer not in (None, first)
    store.teardown()


@pytest.mark.parametrize("own", [True, False])
def test_if_the_process_dies_when_a_new_file_is_in_its_place_that_file_is_no_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    store, path = AsyncCheckpointIO(), tmp_path / "a.ckpt"
    store.start()
    assert store._writer is not None
    write = store._writer.write

    def dies(*args: Any, **options: Any) -> None:
        if own:
            write(*args, **options)
        else:
            torch.save({"step": 3, "weight": torch.zeros(2)}, path)
        raise writer.WriterEndedError("it was ended by SIGKILL")

    monkeypatch.setattr(store._writer, "write", dies)
    with store.new_files():
        store.save_checkpoint({"step": 4, "weight": torch.ones(2)}, path)
    expected = contextlib.nullcontext() if own else pytest.raises(CheckpointError, match="another run has meanwhile")
    with expected:
        store.wait(path)
    assert store.load_checkpoint(path)["step"] == (4 if own else 3)
    store.teardown()


def test_if_the_process_cannot_start_a_thread_writes_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(writer, "_PROGRAM", ["-c", "raise SystemExit(3)"])
    store = AsyncCheckpointIO()
    saved(store, tmp_path / "a.ckpt", 1.0)
    saved(store, tmp_path / "b.ckpt", 2.0)
    assert caplog.text.count("does not work: it has ended with the exit code 3") == 1
    store.teardown()


def test_without_room_for_a_copy_the_save_waits_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    store, path = AsyncCheckpointIO(), tmp_path / "a.ckpt"
    monkeypatch.setattr(arena, "available_memory", lambda: 100)
    store.save_checkpoint({"weight": torch.ones(1000)}, path)
    assert store.is_durable(path)
    assert f"Training waits until {path} is written: a copy of it needs" in caplog.text
    monkeypatch.undo()
    saved(store, path, 2.0)
    store.teardown()


def test_the_structure_is_pickled_while_the_tensors_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first steps after the save compete with the pickling for Python."""
    store, path, pickled, fill = AsyncCheckpointIO(), tmp_path / "a.ckpt", threading.Event(), arena.Arena.fill
    records_of = container.records_of
    done: list[str] = []

    def pickles(value: Any) -> Any:
        result = records_of(value)
        done.append("pickled")
        pickled.set()
        return result

    def fills(memory: arena.Arena) -> None:
        assert pickled.wait(30)
        fill(memory)
        done.append("copied")

    monkeypatch.setattr(container, "records_of", pickles)
    monkeypatch.setattr(arena.Arena, "fill", fills)
    saved(store, path, 1.0)
    assert done == ["pickled", "copied"]
    store.teardown()


def test_a_failure_to_copy_is_raised_and_the_file_before_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = AsyncCheckpointIO(), tmp_path / "a.ckpt"
    saved(store, path, 1.0)

    def fails(memory: arena.Arena) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(arena.Arena, "fill", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        store.save_checkpoint({"weight": torch.full((2,), 2.0)}, path)
    with pytest.raises(CheckpointError, match=r"The state could not be copied: the device is gone"):
        store.wait(path)
    monkeypatch.undo()
    assert store.load_checkpoint(path)["weight"].eq(1.0).all()
    saved(store, path, 3.0)
    store.teardown()


@pytest.mark.parametrize("inner", [None, Keeps])
def test_an_object_that_cannot_be_copied_is_written_before_training_continues(
    tmp_path: Path, caplog: Any, inner: Any
) -> None:
    caplog.set_level("INFO")
    store, path = AsyncCheckpointIO(inner and inner()), tmp_path / "a.ckpt"
    result = 2 * torch.ones(2, requires_grad=True)  # with a graph, which deepcopy refuses
    store.save_checkpoint({"results": deque([result])}, path)
    assert store.is_durable(path)
    assert f"Training waits until {path} is written: an object in it cannot be copied: Only Tensors" in caplog.text
    store.teardown()


def test_an_object_that_cannot_be_pickled_is_the_error_of_other_stores(tmp_path: Path) -> None:
    store, path = AsyncCheckpointIO(), tmp_path / "a.ckpt"
    store.save_checkpoint({"lock": threading.Lock()}, path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt was not written, because an object in it cannot be pickled"):
        store.wait(path)
    store.teardown()


def test_a_forked_process_writes_with_a_thread_and_a_process_of_its_own(tmp_path: Path) -> None:
    store = AsyncCheckpointIO()
    saved(store, tmp_path / "a.ckpt", 1.0)
    child = multiprocessing.get_context("fork").Process(target=saved_and_ended, args=(store, tmp_path / "b.ckpt", 2.0))
    child.start()
    child.join(60)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 0
    saved(store, tmp_path / "c.ckpt", 3.0)
    store.teardown()


def saved_and_ended(store: AsyncCheckpointIO, path: Path, value: float) -> None:
    saved(store, path, value)
    store.teardown()


def test_a_save_uses_few_descriptors_however_many_tensors(tmp_path: Path) -> None:
    gc.collect()  # of what other tests have left open
    store, before = AsyncCheckpointIO(), len(os.listdir("/proc/self/fd"))
    store.save_checkpoint({str(key): torch.full((3,), float(key)) for key in range(2000)}, tmp_path / "a.ckpt")
    assert len(os.listdir("/proc/self/fd")) - before <= 8
    store.wait()
    assert store.load_checkpoint(tmp_path / "a.ckpt")["1999"].eq(1999).all()
    store.teardown()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_waits_for_the_disk_logs_how_to_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, lines = Slow(), list[str]()

    def logged(line: str) -> None:
        lines.append(line)
        inner.may_write.set()

    monkeypatch.setattr(background, "_LONG_S", 0.01)
    monkeypatch.setattr(background, "any_rank_info", logged)
    store = AsyncCheckpointIO(inner)
    store.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
    store.teardown()
    assert "kill it (SIGKILL): the newest complete checkpoint stays" in lines[0]
    assert store.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}


def test_the_next_save_raises_the_error_of_the_last(tmp_path: Path) -> None:
    store = AsyncCheckpointIO()
    (tmp_path / "a.ckpt").mkdir()
    store.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt could not be written: a folder has this name.*Move the folder"):
        store.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "b.ckpt")
    saved(store, tmp_path / "b.ckpt", 2.0)
    store.teardown()


def test_a_store_that_keeps_tensors_keeps_those_of_each_save() -> None:
    inner = Keeps()
    store, weight = AsyncCheckpointIO(inner), torch.ones(2)
    for _ in range(2):
        store.save_checkpoint({"weight": weight}, "a")
        weight.zero_()
    store.wait()
    assert [each["weight"].tolist() for each in inner.kept] == [[1.0, 1.0], [0.0, 0.0]]
    store.teardown()


def test_a_program_that_ends_without_teardown_has_its_checkpoint(tmp_path: Path) -> None:
    program = (
        "import torch; from drivetrain.plugins import AsyncCheckpointIO; store = AsyncCheckpointIO(); "
        f"store.save_checkpoint({{'weight': torch.ones(2**22)}}, {str(tmp_path / 'a.ckpt')!r})"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert TorchCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")["weight"].eq(1).all()


def test_the_process_of_a_save_after_the_run_ends_with_it(tmp_path: Path) -> None:
    store = AsyncCheckpointIO()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[store], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.arange(8.0).reshape(4, 2)), batch_size=2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert store.exists(tmp_path / "a.ckpt")
    assert store._writer is None
