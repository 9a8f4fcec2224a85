"""Names, checksums and removal of the files beside a checkpoint, without processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drivetrain.accelerators import CPUAccelerator
from drivetrain.checkpoints.file import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.strategies import Group, SingleDeviceStrategy, rank_files


class Two(Group):
    """What rank 1 of two exchanges where rank 0 writes nothing."""

    rank, ranks = 1, (0, 1)

    def gather_objects(self, obj: Any) -> list[Any]:
        return [({}, None) if isinstance(obj, tuple) else None, obj]

    def new(self, ranks: Any) -> Group:
        return self


class SecondOfTwo(SingleDeviceStrategy):
    """Rank 1, as far as writing goes."""

    global_rank, world_size, local_rank = 1, 2, 1

    def make_world(self) -> Group:
        return Two()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


@pytest.fixture
def strategy() -> SecondOfTwo:
    return SecondOfTwo(accelerator=CPUAccelerator())


def test_a_rank_reads_back_what_it_wrote(strategy: SecondOfTwo, tmp_path: Path) -> None:
    path, entry, _ = rank_files.write(strategy, {"a": 1}, tmp_path / "m.ckpt")
    assert path == tmp_path / "m.ckpt"
    [file] = tmp_path.iterdir()
    assert entry["name"] == file.name
    assert entry["size"] == file.stat().st_size
    (tmp_path / "m.ckpt").write_text("")
    os.symlink("m.ckpt", tmp_path / "last.ckpt")
    for main in ("m.ckpt", "last.ckpt"):
        assert rank_files.read(strategy, [entry], 1, tmp_path / main, None) == {"a": 1}


def test_names_follow_a_home_folder(strategy: SecondOfTwo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _, entry, _ = rank_files.write(strategy, {"a": 1}, "~/m.ckpt")
    (tmp_path / "m.ckpt").write_text("")
    assert "crc32" in entry
    assert rank_files.read(strategy, [entry], 1, "~/m.ckpt", None) == {"a": 1}
    rank_files.remove_others(TorchCheckpointIO(), "~/m.ckpt")
    assert os.listdir(tmp_path) == ["m.ckpt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../m.ckpt.00000000.rank1"}, "names no rank file"),
        ({"name": "m.ckpt"}, "names no rank file"),
        ({"name": 3}, "str is expected"),
        ({"name": "m.ckpt.00000000.rank1"}, "m.ckpt.00000000.rank1 is missing"),
        ({"size": "large"}, "a count is expected"),
        ({"size": 3}, "bytes, and 3 were written"),
        ({"crc32": 3}, "is damaged: its checksum is wrong"),
    ],
)
def test_an_entry_that_does_not_describe_the_file_is_an_error(
    strategy: SecondOfTwo, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path, entry, _ = rank_files.write(strategy, {"a": 1}, tmp_path / "m.ckpt")
    (tmp_path / "m.ckpt").write_text("")
    with pytest.raises(CheckpointError, match=message):
        rank_files.read(strategy, [{**entry, **change}], 1, path, None)


def test_only_files_of_this_checkpoint_are_removed(tmp_path: Path) -> None:
    theirs = ["m.ckpt", "m.ckpt.0000000g.rank1", "m.ckpt.00000000.rank0", "xm.ckpt.00000000.rank1", "m.ckpt.rank1"]
    for name in (*theirs, "m.ckpt.00000000.rank1", "m.ckpt.00000001.rank12"):
        (tmp_path / name).write_text("")
    rank_files.remove_others(TorchCheckpointIO(), tmp_path / "m.ckpt", {"m.ckpt.00000001.rank12"})
    assert sorted(os.listdir(tmp_path)) == sorted([*theirs, "m.ckpt.00000001.rank12"])
    rank_files.remove_others(TorchCheckpointIO(), tmp_path / "nowhere" / "m.ckpt")


def test_copies_take_the_name_of_the_copy(tmp_path: Path) -> None:
    (tmp_path / "m.ckpt").write_text("")
    (tmp_path / "m.ckpt.00000000.rank1").write_text("one")
    os.symlink("m.ckpt", tmp_path / "link.ckpt")
    assert rank_files.copy(TorchCheckpointIO(), str(tmp_path / "link.ckpt"), str(tmp_path / "copy.ckpt"))
    assert (tmp_path / "copy.ckpt.00000000.rank1").read_text() == "one"


def test_a_link_has_none_and_those_of_what_it_replaces_are_removed(tmp_path: Path) -> None:
    for name in ("m.ckpt", "m.ckpt.00000000.rank1", "last.ckpt", "last.ckpt.00000001.rank1"):
        (tmp_path / name).write_text("")
    assert rank_files.copy(TorchCheckpointIO(), str(tmp_path / "m.ckpt"), str(tmp_path / "last.ckpt"), link=True)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "m.ckpt", "m.ckpt.00000000.rank1"]


def test_what_may_not_be_replaced_keeps_its_files(tmp_path: Path) -> None:
    names = ["last.ckpt", "last.ckpt.00000001.rank1", "m.ckpt"]
    for name in names:
        (tmp_path / name).write_text("")
    store = TorchCheckpointIO()
    assert not rank_files.copy(store, str(tmp_path / "m.ckpt"), str(tmp_path / "last.ckpt"), link=True, replaces=False)
    assert sorted(os.listdir(tmp_path)) == names


def test_a_rank_file_that_the_main_file_lists_is_known_after_a_failed_save(tmp_path: Path) -> None:
    store, path = TorchCheckpointIO(), tmp_path / "a.ckpt"
    own, other = {"name": "a.ckpt.0123abcd.rank1"}, {"name": "a.ckpt.4567abcd.rank1"}
    assert not rank_files.is_listed(store, path, own, rank_files.LISTED)
    store.save_checkpoint({rank_files.LISTED: [own]}, path)
    assert rank_files.is_listed(store, path, own, rank_files.LISTED)
    assert not rank_files.is_listed(store, path, other, rank_files.LISTED)
    path.write_bytes(b"damaged")
    assert rank_files.is_listed(store, path, own, rank_files.LISTED)
