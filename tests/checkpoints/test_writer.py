"""The process that writes: files as torch reads them, errors as they are, and what happens when a side ends."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoints import writer, writer_process
from drivetrain.checkpoints.arena import Arena
from drivetrain.checkpoints.container import records_of
from drivetrain.checkpoints.writer import Writer, WriterEndedError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the process gets a descriptor")


@pytest.fixture
def memory() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


@pytest.fixture
def process(memory: Arena) -> Iterator[Writer]:
    made = Writer(memory)
    yield made
    made.close()


def test_torch_reads_what_it_writes_also_mapped(memory: Arena, process: Writer, tmp_path: Path) -> None:
    (shared,), own = memory.hold([torch.randn(500)]), torch.arange(10)
    memory.fill()
    receipt = process.write(tmp_path / "a.pt", records_of({"a": shared, "b": own, "c": [shared]}), zipped=True)
    content = (tmp_path / "a.pt").read_bytes()
    assert (receipt["size"], receipt["crc32"]) == (len(content), zlib.crc32(content))
    for mapped in (False, True):
        found = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mapped)
        assert torch.equal(found["a"], shared)
        assert torch.equal(found["b"], own)
        assert found["c"][0].data_ptr() == found["a"].data_ptr()
    assert found["a"].data_ptr() % writer_process.ALIGNMENT == 0
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_storage_outside_of_the_shared_memory_needs_no_numpy(
    process: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(tensor: torch.Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", missing)
    process.write(tmp_path / "a.pt", records_of(torch.arange(10)), zipped=True)
    assert torch.load(tmp_path / "a.pt", weights_only=True).tolist() == list(range(10))


def test_plain_records_are_where_it_says(memory: Arena, process: Writer, tmp_path: Path) -> None:
    first, second = memory.hold([torch.randn(3), torch.randn(5)])
    memory.fill()
    records = [(str(key), each.untyped_storage()) for key, each in enumerate((first, second))]
    receipt = process.write(tmp_path / "a.bin", records, zipped=False)
    content = (tmp_path / "a.bin").read_bytes()
    assert (receipt["size"], receipt["crc32"]) == (len(content), zlib.crc32(content))
    for key, each in enumerate((first, second)):
        at, checksum = receipt["records"][str(key)]
        assert content[at : at + each.nbytes] == each.numpy().tobytes()
        assert checksum == zlib.crc32(each.numpy().tobytes())


def test_errors_are_those_of_the_file_system(process: Writer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        process.write(tmp_path / "missing" / "a.pt", [], zipped=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="a folder has this name") as caught:
        process.write(tmp_path / "folder", [("", b"x")], zipped=False)
    assert caught.value.errno == errno.EISDIR
    process.write(tmp_path / "a", [("", b"old")], zipped=False)
    with pytest.raises(FileExistsError):
        process.write(tmp_path / "a", [("", b"new")], zipped=False, new=True)
    assert (tmp_path / "a").read_bytes() == b"old"
    process.write(tmp_path / "a", [("", b"new")], zipped=False)
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL, which the system also sends"),
        ("raise SystemExit(3)", "ended with the exit code 3"),
        ("print('hello, here is a line that nobody has asked for')", "ended"),
    ],
)
def test_a_process_that_does_not_start_is_an_error_that_says_how(
    memory: Arena, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    monkeypatch.setattr(writer, "_PROGRAM", ["-c", program])
    with pytest.raises(WriterEndedError, match=message):
        Writer(memory)


def test_without_a_known_python_it_does_not_start(memory: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", None)  # as in a program that embeds Python
    with pytest.raises(WriterEndedError, match="does not know its Python"):
        Writer(memory)


def test_without_free_descriptors_it_does_not_start(memory: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("multiprocessing.Pipe", none_left)
    with pytest.raises(WriterEndedError, match="could not be started: .*Too many open files"):
        Writer(memory)


def test_descriptors_beyond_those_of_select_work(memory: Arena, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        while stack.enter_context(open(os.devnull)).fileno() < 1024:  # FD_SETSIZE
            pass
        process = Writer(memory)
        process.write(tmp_path / "a", [("", b"x")], zipped=False)
        process.close()
    assert (tmp_path / "a").read_bytes() == b"x"


def test_what_python_prints_when_it_starts_is_no_answer(
    memory: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('a line that nobody has asked for')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = Writer(memory)
    process.write(tmp_path / "a", [("", b"x")], zipped=False)
    process.close()


def test_a_process_that_dies_is_an_error(process: Writer, tmp_path: Path) -> None:
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(WriterEndedError, match="ended by SIGKILL"):
        process.write(tmp_path / "a", [("", b"x")], zipped=False)
    assert os.listdir(tmp_path) == []


def test_signals_for_the_training_do_not_end_it(process: Writer, tmp_path: Path) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(process._process.pid, each)
    process.write(tmp_path / "a", [("", b"x")], zipped=False)
    assert os.getpgid(process._process.pid) != os.getpgid(0)


# The program gives an order for a file of 64 MiB, which takes many chunks, and is killed when the file has begun.
PARENT = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from drivetrain.checkpoints.arena import Arena
from drivetrain.checkpoints.writer import Writer

memory = Arena()
process = Writer(memory)
(held,) = memory.hold([torch.ones(2**24)])
print(process._process.pid, flush=True)
path = Path(sys.argv[1])
write = threading.Thread(target=process.write, args=(path, [("", held.untyped_storage())]), kwargs={"zipped": False})
write.start()
while not list(path.parent.glob(".*.part")):
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_its_parent_and_removes_the_file_that_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    started = [sys.executable, "-c", PARENT, str(tmp_path / "a")]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        written = os.pidfd_open(int(parent.stdout.readline()))
        assert parent.wait(60) == -signal.SIGKILL
    assert select.select([written], [], [], 60)[0] == [written]  # the process has ended
    os.close(written)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"
