"""TorchCheckpointIO: a crash leaves a whole file, and damage is never read in silence."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError

STORE = TorchCheckpointIO()
OLD: dict[str, Any] = {"state_dict": {"w": torch.arange(64.0)}, "epoch": 3, "pair": (1, 2)}
NEW: dict[str, Any] = {"state_dict": {"w": torch.ones(64)}, "epoch": 4, "pair": (3, 4)}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        set(a) == set(b)
        and torch.equal(a["state_dict"]["w"], b["state_dict"]["w"])
        and (a["epoch"], a["pair"]) == (b["epoch"], b["pair"])
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint that is there already."""
    target = tmp_path / "run.ckpt"
    STORE.save_checkpoint(OLD, target)
    return target


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "run.ckpt"  # the folders are made
    STORE.save_checkpoint(OLD, target)
    assert same(STORE.load_checkpoint(target), OLD)
    assert same(STORE.load_checkpoint(str(target)), OLD)
    assert same(torch.load(target, weights_only=True), OLD)
    assert [entry.name for entry in target.parent.iterdir()] == ["run.ckpt"]


def test_it_can_be_loaded_somewhere_else(path: Path) -> None:
    assert STORE.load_checkpoint(path)["state_dict"]["w"].device.type == "cpu"
    assert STORE.load_checkpoint(path, map_location="meta")["state_dict"]["w"].device.type == "meta"


@pytest.mark.parametrize(
    "location",
    [pytest.param("cuda:0", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")), "cdua"],
)
def test_a_device_that_is_not_there_is_the_cause_and_not_the_file(path: Path, location: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"to map_location='{location}', a device that .* map_location=\"cpu\""
    ):
        STORE.load_checkpoint(path, map_location=location)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="was cut short"):  # then the file is, whatever the device
        STORE.load_checkpoint(path, map_location=location)


def test_an_empty_path_is_answered_with_where_it_may_come_from() -> None:
    with pytest.raises(CheckpointError, match="path is empty.* best_model_path of .* saved nothing"):
        STORE.load_checkpoint("")


def test_saving_again_replaces(path: Path) -> None:
    STORE.save_checkpoint(NEW, path)
    assert same(STORE.load_checkpoint(path), NEW)


def test_a_link_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "last.ckpt"
    link.symlink_to(path)
    STORE.save_checkpoint(NEW, link)
    assert not link.is_symlink()
    assert same(STORE.load_checkpoint(path), OLD)


# ---- a crash ---------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Neither an Exception nor an OSError: nobody expects it."""


def half_a_save(failure: BaseException) -> Callable[..., None]:
    whole = torch.save

    def save(obj: Any, stream: Any, *args: Any) -> None:
        buffer = io.BytesIO()
        whole(obj, buffer)
        stream.write(buffer.getvalue()[: buffer.tell() // 2])
        stream.flush()
        raise failure

    return save


def crash_in_save(patch: pytest.MonkeyPatch, failure: BaseException) -> None:
    patch.setattr(torch, "save", half_a_save(failure))


def crash_in(name: str) -> Callable[[pytest.MonkeyPatch, BaseException], None]:
    def inject(patch: pytest.MonkeyPatch, failure: BaseException) -> None:
        def fail(*args: Any) -> None:
            raise failure

        patch.setattr(os, name, fail)

    return inject


CRASHES = {"save": crash_in_save, "fsync": crash_in("fsync"), "replace": crash_in("replace")}


@pytest.mark.parametrize("place", CRASHES)
@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (OSError(28, "No space left on device"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (Crash(), Crash),
    ],
    ids=["OSError", "Ctrl-C", "crash"],
)
def test_a_crash_leaves_the_old_file_whole(
    path: Path, place: str, failure: BaseException, seen: type[BaseException]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        CRASHES[place](patch, failure)
        with pytest.raises(seen) as caught:
            STORE.save_checkpoint(NEW, path)
    if seen is CheckpointError:
        message = str(caught.value)
        assert re.search(r"could not be written: no space left on device: \d+ bytes free in ", message)
        assert "(ENOSPC, errno 28). What was there before is untouched" in message
        assert str(path) in str(caught.value)
    assert same(STORE.load_checkpoint(path), OLD)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.ckpt"]  # no .part


def test_the_same_crash_ruins_a_naive_writer(path: Path) -> None:  # the control of the test above
    with pytest.MonkeyPatch.context() as patch, open(path, "wb") as stream:
        crash_in_save(patch, Crash())
        with pytest.raises(Crash):
            torch.save(NEW, stream)
    with pytest.raises(CheckpointError, match="cut short"):
        STORE.load_checkpoint(path)


def test_a_first_save_that_crashes_leaves_nothing(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        crash_in_save(patch, Crash())
        with pytest.raises(Crash):
            STORE.save_checkpoint(NEW, tmp_path / "first.ckpt")
    assert list(tmp_path.iterdir()) == []


class FullDisk(io.RawIOBase):
    """A stream on which only the first bytes find room; torch's own writer meets it, not a fake of it."""

    def __init__(self, path: Path, room: int) -> None:
        self._file, self._room = io.FileIO(path, "xb"), room

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        if self._room < len(data):
            raise OSError(28, "No space left on device")
        self._room -= len(data)
        return self._file.write(data) or 0

    def close(self) -> None:
        self._file.close()
        super().close()


def test_a_full_disk_is_a_checkpoint_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", lambda name, mode, buffering: FullDisk(Path(name), room=200))
    with pytest.raises(CheckpointError, match=r"no space left on device: \d+ bytes free in .*ENOSPC, errno 28"):
        STORE.save_checkpoint(NEW, path)  # although torch's writer raises something else in its place


def test_a_full_disk_leaves_the_old_file_whole(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", lambda name, mode, buffering: FullDisk(Path(name), room=200))
        with pytest.raises((CheckpointError, RuntimeError)):
            STORE.save_checkpoint(NEW, path)
    assert same(STORE.load_checkpoint(path), OLD)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.ckpt"]


def test_a_folder_that_cannot_be_made(path: Path) -> None:
    with pytest.raises(CheckpointError, match="could not be written"):
        STORE.save_checkpoint(NEW, path / "below a file" / "run.ckpt")


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot open a directory")
def test_everything_is_durable_in_the_right_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(handle: int) -> None:
        calls.append("fsync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "fsync file")
        if calls[-1] == "fsync file":
            assert os.fstat(handle).st_size > 1000  # everything has left Python's own buffer
        fsync(handle)

    def recording_replace(source: Any, target: Any) -> None:
        calls.append("rename")
        assert Path(source).parent == Path(target).parent == path.parent  # one file system: the rename is atomic
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    STORE.save_checkpoint(NEW, path)
    assert calls == ["fsync file", "rename", "fsync folder"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_file_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        STORE.save_checkpoint(OLD, tmp_path / "run.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.ckpt").stat().st_mode) == mode


def test_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"takes no storage_options, got \{'key': 1\}.*plugins"):
        STORE.save_checkpoint(OLD, tmp_path / "run.ckpt", storage_options={"key": 1})
    assert list(tmp_path.iterdir()) == []


# ---- damage ----------------------------------------------------------------------------------------------------------


def flipped(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def records(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of each record's data."""
    with zipfile.ZipFile(path) as container, open(path, "rb") as stream:
        for info in container.infolist():
            stream.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
            yield info.filename, info.header_offset + 30 + name + extra, info.file_size


def test_a_flipped_bit_in_a_weight_is_detected(path: Path) -> None:
    (name, start, size), = [record for record in records(path) if record[0].endswith("data/0")]  # fmt: skip
    assert size == 64 * 4
    flipped(path, start + size // 2, bit=6)
    assert not same(torch.load(path, weights_only=True), OLD)  # the control: torch reads it without a word
    with pytest.raises(CheckpointError, match=rf"damaged: the checksum of '{name}' is wrong"):
        STORE.load_checkpoint(path)


def test_a_flipped_bit_in_any_record_is_detected(path: Path) -> None:
    whole = path.read_bytes()
    found = list(records(path))
    assert len(found) >= 4
    for name, start, size in found:
        for position in {start, start + size // 2, start + size - 1}:
            path.write_bytes(whole)
            flipped(path, position, bit=4)
            with pytest.raises(CheckpointError, match=f"checksum of '{name}'"):
                STORE.load_checkpoint(path)


def outcomes(path: Path) -> Counter[str]:
    """What loading does when one bit anywhere in the file is wrong."""
    whole, seen = path.read_bytes(), Counter[str]()
    for position in range(0, len(whole), 3):
        path.write_bytes(whole)
        flipped(path, position, bit=position % 8)
        try:
            outcome = "the same" if same(STORE.load_checkpoint(path), OLD) else "something else"
        except Exception as error:
            outcome = type(error).__name__
        seen[outcome] += 1
    return seen


def test_no_flipped_bit_is_read_in_silence(path: Path) -> None:
    seen = outcomes(path)
    assert seen["something else"] == 0
    assert seen["CheckpointError"] > 100


def test_every_flipped_bit_is_a_checkpoint_error(path: Path) -> None:
    assert set(outcomes(path)) == {"the same", "CheckpointError"}


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_file_that_was_cut_short(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=f"{path.name} is no checkpoint, or was cut short"):
        STORE.load_checkpoint(path)


def test_what_is_no_zip_file(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    path.write_text("epoch: 3")
    with pytest.raises(CheckpointError, match="no checkpoint, or was cut short"):
        STORE.load_checkpoint(path)


def test_a_zip_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with zipfile.ZipFile(path, "w") as container:
        container.writestr("letter.txt", "Dear reader")
    with pytest.raises(CheckpointError, match=r"run\.ckpt"):
        STORE.load_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "message"), [("missing.ckpt", r"There is no checkpoint at .*\. Check the path"), (".", "is a folder")]
)
def test_what_is_not_there(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        STORE.load_checkpoint(tmp_path / name)


class Trap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_an_object_in_the_checkpoint_is_not_run(path: Path) -> None:
    folder = path.parent / "made by the checkpoint"
    torch.save({"model": OLD, "trap": Trap(folder)}, path)
    with pytest.raises(CheckpointError, match="no plain data, and unpickling them could run code"):
        STORE.load_checkpoint(path)
    assert not folder.exists()
    torch.load(path, weights_only=False)  # the control: elsewhere it does run
    assert folder.exists()


def test_t27_an_object_in_a_checkpoint_of_a_trainer_is_left_out(path: Path) -> None:
    folder = path.parent / "made by the checkpoint"
    torch.save({**OLD, "hyper_parameters": {"lr": 0.1, "trap": Trap(folder)}}, path)
    with pytest.warns(UserWarning, match=r"left out: hyper_parameters/trap \((posix|nt).mkdir\)"):
        loaded = STORE.load_checkpoint(path)
    assert same({key: loaded[key] for key in OLD}, OLD)
    assert loaded["hyper_parameters"]["lr"] == 0.1
    assert not folder.exists()


def test_t27_a_checkpoint_in_torchs_older_format(path: Path) -> None:
    torch.save(OLD, path, _use_new_zipfile_serialization=False)
    assert same(STORE.load_checkpoint(path), OLD)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        STORE.load_checkpoint(path)


def test_weights_only_false_runs_what_the_file_brings(path: Path) -> None:
    folder = path.parent / "made by the checkpoint"
    torch.save({**OLD, "hyper_parameters": Trap(folder)}, path)
    assert STORE.load_checkpoint(path, weights_only=False)["epoch"] == 3
    assert folder.exists()


def test_with_weights_only_false_damage_is_detected_all_the_same(path: Path) -> None:
    (_, start, _), = [record for record in records(path) if record[0].endswith("data/0")]  # fmt: skip
    flipped(path, start)
    with pytest.raises(CheckpointError, match="damaged: the checksum of"):
        STORE.load_checkpoint(path, weights_only=False)


def test_an_object_whose_class_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({**OLD, "object": Gone()}, path)
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    with pytest.raises(CheckpointError, match="holds an object that cannot be unpickled: .*Gone.*Use the code"):
        STORE.load_checkpoint(path, weights_only=False)


class Gone:
    pass


def test_what_cannot_be_pickled_leaves_the_old_file_whole(path: Path) -> None:
    for thing in (lambda: 1, threading.Lock()):
        with pytest.raises(CheckpointError, match="was not written, because an object in it cannot be pickled"):
            STORE.save_checkpoint({**NEW, "thing": thing}, path)
    assert same(STORE.load_checkpoint(path), OLD)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.ckpt"]


def test_remove(path: Path) -> None:
    STORE.remove_checkpoint(str(path))
    assert not path.exists()
    STORE.remove_checkpoint(path)  # not there any more: no error


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    target = tmp_path / ("x" * (longest - 5) + ".ckpt")
    STORE.save_checkpoint(OLD, target)
    assert same(STORE.load_checkpoint(target), OLD)
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(CheckpointError, match="could not be written: file name too long"):
        STORE.save_checkpoint(OLD, tmp_path / ("x" * (longest - 4) + ".ckpt"))
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_in_place_of_the_target_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last.ckpt").mkdir()
    monkeypatch.setattr(torch, "save", lambda *args: pytest.fail("bytes were written"))
    with pytest.raises(CheckpointError, match=r"last\.ckpt could not be written: a folder has this name"):
        STORE.save_checkpoint(OLD, tmp_path / "last.ckpt")


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems take UTF-8 only")
def test_a_folder_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    target = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")) / "run.ckpt"
    STORE.save_checkpoint(OLD, target)
    assert same(STORE.load_checkpoint(target), OLD)
    torch.save({**OLD, "foreign": Path("x"), "pytorch-lightning_version": "2.0"}, target)
    with pytest.warns(UserWarning, match="no plain data"):
        assert STORE.load_checkpoint(target)["epoch"] == 3
    target.write_bytes(target.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cut short"):
        STORE.load_checkpoint(target)


def test_new_files_replace_nothing(path: Path) -> None:
    with STORE.new_files() as refused:
        STORE.save_checkpoint(NEW, path)
        STORE.save_checkpoint(NEW, path.with_name("new.ckpt"))
    assert refused == [str(path)]
    assert same(STORE.load_checkpoint(path), OLD)
    assert same(STORE.load_checkpoint(path.with_name("new.ckpt")), NEW)
    assert len(list(path.parent.iterdir())) == 2
    STORE.save_checkpoint(NEW, path)
    assert same(STORE.load_checkpoint(path), NEW)


def test_new_files_on_a_file_system_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with STORE.new_files() as refused:
        STORE.save_checkpoint(NEW, path.with_name("new.ckpt"))
    assert refused == []
    assert same(STORE.load_checkpoint(path.with_name("new.ckpt")), NEW)


# ---- open files ------------------------------------------------------------------------------------------------------


def test_an_open_file_is_read_like_a_path(path: Path) -> None:
    assert same(STORE.load_checkpoint(io.BytesIO(path.read_bytes())), OLD)
    with open(path, "rb") as stream:
        assert same(STORE.load_checkpoint(stream), OLD)
    behind = io.BytesIO(b"header" + path.read_bytes())
    behind.seek(6)
    assert same(STORE.load_checkpoint(behind), OLD)


def test_an_open_file_is_checked_like_a_path(path: Path, tmp_path: Path) -> None:
    for _, start, size in records(path):
        if size == 64 * 4:
            flipped(path, start + 100, bit=6)
    with pytest.raises(CheckpointError, match="the open file \\(BytesIO\\) is damaged: the checksum"):
        STORE.load_checkpoint(io.BytesIO(path.read_bytes()))
    with pytest.raises(CheckpointError, match="cut short"):
        STORE.load_checkpoint(io.BytesIO(b""))
    torch.save({"a": Counter, "b": os.getcwd}, tmp_path / "objects.ckpt")
    with pytest.raises(CheckpointError, match="no plain data"), open(tmp_path / "objects.ckpt", "rb") as stream:
        STORE.load_checkpoint(stream)


def test_what_is_no_binary_file(path: Path) -> None:
    with pytest.raises(ConfigurationError, match='open as text. Open it with open\\(path, "rb"\\)'), open(path) as text:
        STORE.load_checkpoint(text)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="a path or an open binary file, not from an int: 3"):
        STORE.load_checkpoint(3)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_device_is_not_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match=r"pipe could not be written: .*[Ss]ave under another name"):
        TorchCheckpointIO().save_checkpoint({}, pipe)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", 5, None, b"bytes"])
def test_what_cannot_be_the_name_of_a_checkpoint(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="A checkpoint is saved under a path, not") as caught:
        TorchCheckpointIO().save_checkpoint({}, name)
    assert str(caught.value).isascii()
    assert os.listdir(tmp_path) == []
    if isinstance(name, str):
        with pytest.raises(CheckpointError, match=r"no checkpoint|is a folder"):
            TorchCheckpointIO().load_checkpoint(name)


def test_a_name_that_is_too_long_to_be_there() -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint at xxx"):
        TorchCheckpointIO().load_checkpoint("x" * 300)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    TorchCheckpointIO().save_checkpoint({"a": 1}, "~/saved.ckpt")
    assert os.listdir(tmp_path) == ["home"]
    assert TorchCheckpointIO().load_checkpoint("~/saved.ckpt") == {"a": 1}


def test_an_open_file_that_cannot_be_read(path: Path, tmp_path: Path) -> None:
    TorchCheckpointIO().save_checkpoint({}, path)
    closed = path.open("rb")
    closed.close()
    ends = os.pipe()
    with os.fdopen(ends[0], "rb") as pipe, os.fdopen(ends[1], "wb"), (tmp_path / "new").open("wb") as written:
        for file in (closed, written, pipe):
            with pytest.raises(ConfigurationError, match=r"cannot be read from any place in it .*Pass its path"):
                TorchCheckpointIO().load_checkpoint(file)


def test_a_checkpoint_that_cannot_be_removed_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", broken)
    with pytest.raises(CheckpointError, match=r"a\.ckpt could not be removed: read-only file system \(EROFS"):
        TorchCheckpointIO().remove_checkpoint(tmp_path / "a.ckpt")
