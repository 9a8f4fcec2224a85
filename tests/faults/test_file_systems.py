"""Saves to file systems that are full, read-only or shared: the checkpoint before stays, and the error names why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.checkpoints.io import CheckpointIO, wait_for
from drivetrain.errors import CheckpointError
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.strategies import SingleDeviceStrategy, sharded_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts and limits of Linux")

SIZE = 2**20  # bytes of the small file system
SHARED = Path(__file__).with_name("shared_folder_program.py")


@pytest.fixture(params=["plain", "background"])
def store(request: pytest.FixtureRequest) -> Iterator[CheckpointIO]:
    made = TorchCheckpointIO() if request.param == "plain" else AsyncCheckpointIO()
    yield made
    made.teardown()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Any]:
    """Mounts a file system at a new folder, with the options of ``mount``; returns the folder."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounted = []

    def run(*options: str) -> Path:
        done = subprocess.run(["mount", *options, folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this process cannot mount a file system: {done.stderr}")
        mounted.append(folder)
        return folder

    yield run
    for each in mounted:
        subprocess.run(["umount", each], check=True)


def content(step: int, size: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"w": torch.full((size // 4,), float(step))}}


def save(store: CheckpointIO, kind: str, path: Path, checkpoint: dict[str, Any]) -> None:
    if kind == "file":
        store.save_checkpoint(checkpoint, path)
    else:
        sharded_files.save(SingleDeviceStrategy(checkpoint_io=store), checkpoint, path)
    wait_for(store, path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_on_a_full_disk_the_checkpoint_before_stays_until_there_is_room(
    mount: Any, store: CheckpointIO, kind: str
) -> None:
    folder = mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs")
    other, path = folder / "other", folder / "a.ckpt"
    other.write_bytes(bytes(SIZE // 4))
    save(store, kind, path, content(1, SIZE // 2))
    with pytest.raises(CheckpointError, match=r"a\.ckpt.* (could not be|was not) written: .*(?i:no space left)"):
        save(store, kind, path, content(2, SIZE // 2))
    assert TorchCheckpointIO().load_checkpoint(path)["global_step"] == 1
    assert sorted(each.name for each in folder.iterdir()) == ["a.ckpt", "other"]
    other.unlink()
    save(store, kind, path, content(3, SIZE // 4))
    assert TorchCheckpointIO().load_checkpoint(path)["global_step"] == 3


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_in_a_read_only_folder_the_checkpoint_before_stays(
    mount: Any, tmp_path: Path, store: CheckpointIO, kind: str
) -> None:
    writable = tmp_path / "runs"
    save(TorchCheckpointIO(), kind, writable / "a.ckpt", content(1, 64))
    if os.geteuid() == 0:  # whom permissions do not stop
        path = mount("--bind", "-o", "ro", str(writable)) / "a.ckpt"
    else:
        path = writable / "a.ckpt"
        for folder in (writable, path):
            folder.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match=r"a\.ckpt could not be written: .*(?i:read-only|permission denied)"):
            save(store, kind, path, content(2, 64))
        assert TorchCheckpointIO().load_checkpoint(path)["global_step"] == 1
    finally:
        if os.geteuid():
            for folder in (writable, path):
                folder.chmod(0o755)
    save(store, kind, writable / "a.ckpt", content(3, 64))
    assert TorchCheckpointIO().load_checkpoint(writable / "a.ckpt")["global_step"] == 3


LIMITED = """
import resource, sys
import torch
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.plugins import AsyncCheckpointIO

store = TorchCheckpointIO() if sys.argv[1] == "plain" else AsyncCheckpointIO()
store.save_checkpoint({"w": torch.zeros(2**10)}, "a.ckpt")
store.wait()
store.teardown()  # the next process that writes has the limit too
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
try:
    store.save_checkpoint({"w": torch.ones(2**16)}, "a.ckpt")
    store.wait()
except CheckpointError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(store.load_checkpoint("a.ckpt")["w"]))
store.teardown()
store.save_checkpoint({"w": torch.ones(2**16)}, "a.ckpt")
store.wait()
print(len(store.load_checkpoint("a.ckpt")["w"]))
store.teardown()
"""


@pytest.mark.parametrize("kind", ["plain", "background"])
def test_a_limit_of_the_size_of_files_stops_a_save_in_the_middle(programs: Any, tmp_path: Path, kind: str) -> None:
    done = programs.run("-c", LIMITED, kind, cwd=tmp_path)
    error, *sizes = done.stdout.splitlines()
    assert error.startswith("The checkpoint a.ckpt could not be written: file too large (EFBIG"), done.stderr
    assert "Raise the limit of the size of files (ulimit -f)" in error
    assert sizes == [str(2**10), str(2**16)]
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("kind", ["plain", "background"])
def test_two_runs_in_one_folder_leave_complete_files(programs: Any, tmp_path: Path, kind: str) -> None:
    """The saves of one run replace none of the other's."""
    folder, store = tmp_path / "runs", TorchCheckpointIO()
    done = programs.run(SHARED, folder, kind, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(each["run"] for each in runs) == [1, 2]
    for each in runs:
        assert len(each["files"]) == 7, each
        for path in each["files"]:
            weight = store.load_checkpoint(path)["state_dict"]["weight"]
            assert weight.tolist() == [each["run"]] * 2
    assert all(path.suffix == ".ckpt" for path in folder.iterdir())
