"""Files behind addresses: whole or not at all, explained when they fail, and nothing for who uses none."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from drivetrain.base import files, remote
from drivetrain.errors import ConfigurationError


@pytest.fixture
def folder() -> Iterator[str]:
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    fsspec.filesystem("memory").rm(name, recursive=True) if remote.names(name) else None


def test_what_is_written_is_read(folder: str) -> None:
    address = f"{folder}/a/b.txt"
    assert remote.written_at(address) is None
    files.write(address, b"first")
    files.write(address, b"second")
    assert remote.read(address) == b"second"
    assert (remote.read(address, 1, 3), remote.size(address)) == (b"eco", 6)
    assert remote.written_at(address) is not None
    assert remote.names(f"{folder}/a") == ["b.txt"]  # no part is left beside it
    with remote.fetched(address) as local:
        assert local.read_bytes() == b"second"
    assert not local.exists()


def test_what_is_not_there_is_nothing(folder: str) -> None:
    assert (remote.names(folder), remote.find(folder, "*")) == ([], [])
    remote.remove(f"{folder}/none")
    with pytest.raises(FileNotFoundError), remote.fetched(f"{folder}/none"):
        pass


def test_files_are_found_by_pattern(folder: str) -> None:
    for name in ("a.ckpt", "b.ckpt", "c.txt", "sub/d.ckpt", "[x].ckpt"):
        files.write(f"{folder}/{name}", b".")
    assert sorted(remote.find(f"{folder}/", "*.ckpt")) == [
        f"{folder}/{name}" for name in ("[x].ckpt", "a.ckpt", "b.ckpt")
    ]
    assert remote.find(folder, "[[]x].*") == [f"{folder}/[x].ckpt"]
    assert sorted(remote.names(folder)) == ["[x].ckpt", "a.ckpt", "b.ckpt", "c.txt", "sub"]


def test_a_block_that_fails_writes_nothing(folder: str) -> None:
    files.write(f"{folder}/a", b"whole")
    with contextlib.suppress(ZeroDivisionError), files.replacing(f"{folder}/a") as stream:
        stream.write(b"half")
        stream.write(bytes([1 // 0]))
    assert (remote.read(f"{folder}/a"), remote.names(folder)) == (b"whole", ["a"])


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the file system lose its connection after half of each upload."""

    def put_file(self: Any, lpath: str, rpath: str, **kwargs: Any) -> None:
        with self.open(rpath, "wb") as stream:
            stream.write(Path(lpath).read_bytes()[: os.path.getsize(lpath) // 2])
        raise ConnectionResetError(104, "Connection reset by peer")

    return lambda: monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)


def test_an_upload_that_fails_leaves_what_was_there(folder: str, broken: Callable[[], None]) -> None:
    files.write(f"{folder}/a", b"whole")
    broken()
    with pytest.raises(OSError, match=f"{folder}/a could not be written .*Connection reset by peer"):
        files.write(f"{folder}/a", b"another content")
    assert (remote.read(f"{folder}/a"), remote.names(folder)) == (b"whole", ["a"])


def test_an_upload_that_is_cut_short_in_silence_is_noticed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_file(self: Any, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.pipe_file(rpath, b"hal")

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(OSError, match="3 bytes of 5 arrived"):
        files.write(f"{folder}/a", b"whole")


def test_a_new_file_replaces_none(folder: str) -> None:
    files.write(f"{folder}/a", b"first")
    with pytest.raises(FileExistsError), files.replacing(f"{folder}/a", new=True) as stream:
        stream.write(b"second")
    assert remote.read(f"{folder}/a") == b"first"


def test_files_are_copied_to_and_from_addresses(folder: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"local")
    assert remote.copy(tmp_path / "a", f"{folder}/a")
    assert remote.copy(f"{folder}/a", f"{folder}/b")
    assert not remote.copy(f"{folder}/a", f"{folder}/b", replaces=False)
    assert remote.copy(f"{folder}/b", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == remote.read(f"{folder}/b") == b"local"


def test_a_missing_package_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for protocol, package in (("s3", "s3fs"), ("gs", "gcsfs"), ("http", "aiohttp")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigurationError, match=f"pip install {package}"):
            remote.check(f"{protocol}://bucket/run")
    with pytest.raises(ConfigurationError, match="knows no protocol 's33'"):
        remote.check("s33://bucket/run")
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install fsspec s3fs"):
        remote.check("s3://bucket/run")


def test_http_is_for_reading() -> None:
    with pytest.raises(ConfigurationError, match="http://host/run"):
        remote.check_writable("http://host/run")


def test_which_paths_are_addresses() -> None:
    assert [files.is_remote(path) for path in ("s3://b/x", "memory://x", "gs://b")] == [True] * 3
    local = ("a/b", "/a", "C:\\runs", "C:/runs", "file:///a", Path("a"), b"s3://b", 3, None)
    assert [files.is_remote(path) for path in local] == [False] * len(local)
    assert files.spelled("file:///runs/a") == "/runs/a"
    assert files.spelled("C:/runs") == "C:/runs"
    assert files.absolute("s3://b/x/") == "s3://b/x"
    assert files.absolute("a") == os.path.join(os.getcwd(), "a")
    assert files.resolved("s3://b/x/../y//z") == "s3://b/y/z"  # so that none is taken for one below b/x


def test_an_address_that_pathlib_has_changed_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Pass it as a string: 's3://b/x'"):
        files.spelled(Path("s3://b/x"))
