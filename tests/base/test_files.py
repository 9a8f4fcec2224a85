"""Files that are replaced: complete or not at all, and a failure says why."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.base import files


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    with files.replacing(target) as stream:
        stream.write(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new"
    files.write(target, b"newer")
    assert target.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice about files")
@pytest.mark.parametrize("refused", [False, True])
def test_the_disk_begins_to_write_a_large_durable_file_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    calls, sync = list[object](), os.fsync

    def advise(descriptor: int, *advice: int) -> None:
        calls.append(advice)
        if refused:
            raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), sync(descriptor)))
    monkeypatch.setattr(files, "_EARLY", 2 * files._BUFFER)
    part = bytes(range(256)) * (files._BUFFER // 256)
    for durable, parts in ((False, 5), (True, 1), (True, 5)):
        with files.replacing(tmp_path / "a", durable=durable) as stream:
            for _ in range(parts):
                stream.write(part)
        assert (tmp_path / "a").read_bytes() == parts * part
    drop, fsyncs = os.POSIX_FADV_DONTNEED, ["fsync", "fsync"]  # of the file, and of its folder
    assert calls == [*fsyncs, (0, 2 * len(part), drop), (0, 4 * len(part), drop), *fsyncs]


def test_an_exception_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_bytes(b"old")

    def interrupted() -> None:
        with files.replacing(target) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_temporary_names_are_short_and_differ(tmp_path: Path) -> None:
    names = {files.temporary_beside(tmp_path / ("x" * 255)).name for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) < 64


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe, a device or a socket") as caught:
        files.write(pipe, b"new")
    assert caught.value.errno == errno.EINVAL
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]
    link.symlink_to(pipe)  # a link is replaced, not followed
    for target in (link, file):
        files.write(target, b"new")
        assert target.read_bytes() == b"new"
    assert pipe.is_fifo()


def test_new_refuses_a_file_that_appeared_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"

    def overtaken() -> None:
        with files.replacing(target, new=True) as stream:
            stream.write(b"mine")
            target.write_bytes(b"theirs")

    with pytest.raises(FileExistsError):
        overtaken()
    assert target.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [target]


def refused(*paths: object) -> None:
    raise PermissionError(errno.EPERM, "no links here")


def test_where_links_are_refused_a_copy_replaces_only_what_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "new", tmp_path / "last"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    monkeypatch.setattr(os, "symlink", refused)

    assert not files.link(source, target, replaces=False)
    assert target.read_bytes() == b"old"
    assert files.link(source, target)
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["last", "new"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_became_a_pipe_while_a_file_was_written_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"

    def overtaken() -> None:
        with files.replacing(target) as stream:
            stream.write(b"new")
            os.mkfifo(target)

    with pytest.raises(OSError, match="pipe, a device or a socket"):
        overtaken()
    assert target.is_fifo()
    assert os.listdir(tmp_path) == ["a.txt"]


def renames(source: str) -> list[str]:
    """The calls in ``source`` that put one file in another's place."""
    calls = {"os.replace", "os.rename", "os.renames", "shutil.move", "files.replace"}
    nodes = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [name for name in map(ast.unparse, nodes) if name in calls or name.endswith((".rename", ".renames"))]


def test_one_function_of_the_package_replaces_files() -> None:
    package = Path(files.__file__).parent.parent
    found = {str(path.relative_to(package)): renames(path.read_text("utf-8")) for path in package.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {os.path.join("base", "files.py"): ["os.replace"]}
    assert renames("os.rename(a, b)\nfiles.move(a, b)\npath.rename(b)") == ["os.rename", "path.rename"]  # the control


PROGRAM = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
from drivetrain.base import files
try:
    files.write(Path(sys.argv[1]), b"x" * 100_000)
except OSError as error:
    print(error.errno, error.strerror)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on file sizes")
def test_a_limit_on_file_sizes_is_named(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(target)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{errno.EFBIG} file too large (EFBIG, errno {errno.EFBIG})\n"
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_that_can_be_made_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (str(tmp_path), str(tmp_path / "a" / "b"), "", "runs", "a\udce9b", "n" * 255):
        assert files.impossible_folder(folder) is None, folder
        os.makedirs(folder or ".", exist_ok=True)  # the control
    assert files.impossible_folder(str(tmp_path / "a" / "new")) is None
    assert not (tmp_path / "a" / "new").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "there is a file of this name"),
        ("file/below/it", "/file is a file"),
        ("a\0b", "it contains a NUL character"),
        ("a\ud800b", r"it contains '\ud800', which no file name can"),
        ("n" * 256, "its name is too long"),
        ("new/" + "n" * 256, "a name in it is longer than 255 bytes"),
        ("/".join(["n" * 200] * 30), "its name is too long"),
    ],
)
def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    folder = f"{tmp_path}/{name}"
    found = files.impossible_folder(folder)
    assert found is not None
    assert found.endswith(why)
    with pytest.raises((OSError, ValueError)):  # the control
        os.makedirs(folder)


def test_a_temporary_file_that_cannot_be_removed_does_not_make_a_write_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "unlink", broken)
    files.write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.skipif(os.name != "posix", reason="there are no locks of folders")
def test_ctrl_c_in_the_wait_for_a_lock_leaves_no_open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    def is_open(handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), tmp_path.stat())
        except OSError:
            return False

    unlock = files.locked(tmp_path, 60.0)
    monkeypatch.setattr(files.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.locked(tmp_path, 60.0)
    assert sum(map(is_open, range(1000))) == 1
    unlock()
    assert not any(map(is_open, range(1000)))
