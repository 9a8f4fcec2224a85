"""A checkpoint as a folder: parts of tensors from several processes, a manifest that is written last."""

from __future__ import annotations

import copy
import json
import os
import shutil
import uuid
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from drivetrain.base import files, remote
from drivetrain.checkpoints import TorchCheckpointIO, part_lists, sharded
from drivetrain.errors import CheckpointError
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.strategies import SingleDeviceStrategy, sharded_files

WHOLE = torch.arange(35, dtype=torch.float64).reshape(5, 7)
OTHERS = {
    "bfloat16": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "bool": torch.tensor([True, False]), "complex": torch.tensor([1 + 2j]), "empty": torch.zeros(0, 3),
    "number": torch.tensor(7), "transposed": torch.arange(6).reshape(2, 3).t(),
}  # fmt: skip


def saved(folder: Path | str, save: str = "0000000a", plus: float = 0.0) -> dict[str, torch.Tensor]:
    """What three processes save: rows 0 and 1, row 2, and a lower block in two parts; rank 0 the rest."""
    whole = WHOLE + plus
    boxes = [((0, 0), (2, 7)), ((2, 0), (1, 7)), ((3, 0), (2, 3)), ((3, 3), (2, 4))]
    sharded.prepare(folder, new=False)
    everyones = []
    for rank in range(3):
        own = boxes[rank : rank + 1] if rank < 2 else boxes[2:]
        parts = [
            ("model.w", whole[at[0] : at[0] + shape[0], at[1] : at[1] + shape[1]], (5, 7), (at, shape))
            for at, shape in own
        ]
        if rank == 0:
            parts += [
                (name, value, tuple(value.shape), ((0,) * value.ndim, tuple(value.shape)))
                for name, value in OTHERS.items()
            ]
        written = sharded.write_tensors(folder, f"{save}.rank{rank}.bin", parts)
        everyones.append(sharded.list_apart(folder, f"{save}.rank{rank}.parts.json", written, 3))
    tree = {"w": {"$tensor": "model.w"}, **{name: {"$tensor": name} for name in OTHERS}, "epoch": 3 + plus}
    sharded.commit(folder, save, tree, everyones)
    return {"w": whole, **OTHERS, "epoch": 3 + plus}  # type: ignore[dict-item]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_parts_of_several_processes_are_read_as_whole_tensors(tmp_path: Path) -> None:
    expected = saved(tmp_path / "one")
    for found in (sharded.read(tmp_path / "one"), TorchCheckpointIO().load_checkpoint(tmp_path / "one")):
        same(found, expected)


def test_a_lazy_tensor_reads_the_part_that_is_asked_for_and_acts_as_the_whole(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    tensor = sharded.read(tmp_path / "one", lazy=("model.",))["w"]
    assert isinstance(tensor, sharded.StoredTensor)
    assert (tensor.shape, tensor.dtype) == (WHOLE.shape, WHOLE.dtype)
    same(tensor.part((1, 2), (3, 4)), WHOLE[1:4, 2:6])
    same(tensor.part((5, 0), (0, 7)), WHOLE[5:])
    same(tensor + 1, WHOLE + 1)
    same(torch.zeros(5, 7, dtype=torch.float64).copy_(tensor), WHOLE)
    same(copy.deepcopy(tensor), WHOLE)
    (tmp_path / "one" / "0000000a.rank1.bin").unlink()
    same(tensor.part((3, 0), (2, 7)), WHOLE[3:])  # rank 1's row is not needed
    with pytest.raises(CheckpointError, match=r"0000000a.rank1.bin is missing"):
        tensor.part((2, 0), (1, 1))


def test_what_was_not_saved_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    path = tmp_path / "one" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["tensors"]["model.w"]["pieces"][2]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"a part of model.w was not saved"):
        sharded.read(tmp_path / "one")


@pytest.mark.parametrize("version", [99, "1"])
def test_a_manifest_of_another_version_or_form_is_an_error(tmp_path: Path, version: Any) -> None:
    saved(tmp_path / "one")
    path = tmp_path / "one" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(CheckpointError, match=r"newer version|manifest.json is damaged"):
        sharded.read(tmp_path / "one")
    path.write_text(json.dumps({"format": "x"}))
    with pytest.raises(CheckpointError, match="another program"):
        sharded.read(tmp_path / "one")


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    path = tmp_path / "one" / "manifest.json"
    path.write_text(path.read_text().replace("0000000a.rank1.bin", "../rank1.bin"))
    with pytest.raises(CheckpointError, match=r"names the file '../rank1.bin'"):
        sharded.read(tmp_path / "one")


class Crash(BaseException):
    """Nothing cleans up after it."""


def test_a_crash_at_any_write_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = os.replace, [0, 0]

    def replace(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise Crash
        original(*args)

    monkeypatch.setattr(os, "replace", replace)
    outcomes = []
    for number in range(1, 7):
        folder = tmp_path / str(number)
        calls[:] = [0, 0]
        old = saved(folder)
        calls[:] = [0, number]
        try:
            new = saved(folder, "0000000b", plus=1.0)
        except Crash:
            same(sharded.read(folder), old)
            outcomes.append("old")
        else:
            same(sharded.read(folder), new)
            outcomes.append("new")
        calls[:] = [0, 0]
        newest = saved(folder, "0000000c", plus=2.0)
        same(sharded.read(folder), newest)
        assert {name[:8] for name in os.listdir(folder)} == {"manifest", "0000000c"}
    assert outcomes == ["old"] * 5 + ["new"]  # three files of tensors, one of the rest, the manifest


def test_a_first_save_that_crashes_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TorchCheckpointIO()
    monkeypatch.setattr(sharded, "commit", lambda *_: None)
    saved(tmp_path / "one")
    assert not sharded.is_checkpoint(tmp_path / "one")
    assert not store.is_complete(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"a folder without manifest.json, so no save to it was finished"):
        store.load_checkpoint(tmp_path / "one")
    sharded.discard(tmp_path / "one", "0000000a")
    assert not (tmp_path / "one").exists()


def test_a_file_that_rank_zero_does_not_see_is_an_error(tmp_path: Path) -> None:
    sharded.prepare(tmp_path / "one", new=False)
    written = part_lists.Written({"0000000a.rank1.bin": {"size": 4, "crc32": 0}})
    with pytest.raises(CheckpointError, match="does not see 0000000a.rank1.bin.*all machines share"):
        sharded.commit(tmp_path / "one", "0000000a", {}, [written])
    assert not sharded.is_checkpoint(tmp_path / "one")


# ---- in a store ------------------------------------------------------------------------------------------------------


def test_a_store_copies_links_lists_and_removes_folders(tmp_path: Path) -> None:
    store, one, two, last = TorchCheckpointIO(), tmp_path / "one.ckpt", tmp_path / "two.ckpt", tmp_path / "last.ckpt"
    expected = saved(one)
    (one / "notes.txt").write_text("mine")
    assert store.copy(one, two)
    same(store.load_checkpoint(two), expected)
    assert not store.copy(one, two, replaces=False)
    newer = saved(one, "0000000b", plus=1.0)
    assert store.copy(one, two)
    same(store.load_checkpoint(two), newer)
    assert {name[:8] for name in os.listdir(two)} == {"manifest", "0000000b"}
    assert store.copy(one, last, link=True)
    assert store.link_target(last) == "one.ckpt"
    same(store.load_checkpoint(last), newer)
    assert sorted(store.find(tmp_path, "*.ckpt")) == sorted(map(str, (one, two, last)))
    assert store.written_at(one) == (one / "manifest.json").stat().st_mtime
    os.utime(one / "manifest.json", (100, 200))
    store.touch(one)
    assert (store.written_at(one) or 0) > 200
    store.remove_checkpoint(last)
    assert store.is_complete(one)
    store.remove_checkpoint(two)
    assert not two.exists()
    store.remove_checkpoint(one)
    assert os.listdir(one) == ["notes.txt"]  # which is not the checkpoint's


def test_the_whole_folder_may_be_moved_and_renamed(tmp_path: Path) -> None:
    expected = saved(tmp_path / "one.ckpt")
    shutil.move(tmp_path / "one.ckpt", tmp_path / "elsewhere")
    same(sharded.read(tmp_path / "elsewhere"), expected)


def test_a_failed_copy_names_both_and_leaves_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, expected = TorchCheckpointIO(), saved(tmp_path / "two.ckpt")
    saved(tmp_path / "one.ckpt", "0000000b", plus=1.0)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "copy", full)
    with pytest.raises(CheckpointError, match=r"two.ckpt could not become a copy of .*one.ckpt: no space left"):
        store.copy(tmp_path / "one.ckpt", tmp_path / "two.ckpt")
    same(store.load_checkpoint(tmp_path / "two.ckpt"), expected)
    (tmp_path / "last.ckpt").symlink_to("two.ckpt")
    with pytest.raises(CheckpointError, match="What was there before is untouched"):
        store.copy(tmp_path / "one.ckpt", tmp_path / "last.ckpt")
    assert os.readlink(tmp_path / "last.ckpt") == "two.ckpt"


def test_random_damage_is_a_checkpoint_error_or_changes_nothing(tmp_path: Path) -> None:
    random, folder = Random(7), tmp_path / "one"
    saved(folder)
    contents = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    refused = 0
    for _ in range(150):
        name = random.choice(sorted(contents))
        content = bytearray(contents[name])
        for _ in range(random.randint(1, 4)):
            content[random.randrange(len(content))] = random.choice(b'0123456789"{}[],:-az\x00\xff')
        (folder / name).write_bytes(content)
        try:
            found = sharded.read(folder)
            assert set(found) == {"w", *OTHERS, "epoch"}
        except CheckpointError:
            refused += 1
        (folder / name).write_bytes(contents[name])
    assert refused > 100
    sharded.read(folder)


def test_a_folder_at_an_address_is_written_read_copied_and_removed() -> None:
    folder, store = f"memory://{uuid.uuid4().hex}/one.ckpt", TorchCheckpointIO()
    for save, plus in (("0000000a", 0.0), ("0000000b", 1.0)):  # the files of the first are removed by the second
        expected = saved(folder, save, plus)
    assert all(name == "manifest.json" or name.startswith("0000000b.") for name in remote.names(folder))
    same(sharded.read(folder), expected)
    same(store.load_checkpoint(folder), expected)
    lazy = sharded.read(folder, lazy=("model.",))["w"]
    assert isinstance(lazy, sharded.StoredTensor)
    same(lazy.part((1, 2), (3, 4)), expected["w"][1:4, 2:6])  # reads only what it needs
    assert store.exists(folder)
    assert store.find(os.path.dirname(folder), "*.ckpt") == [folder]
    assert store.copy(folder, f"{folder}.copy", link=True)  # there are no links
    store.remove_checkpoint(folder)
    assert not store.exists(folder)
    with pytest.raises(CheckpointError, match=folder):
        store.load_checkpoint(folder)
    same(store.load_checkpoint(f"{folder}.copy"), expected)
    assert store.is_complete(f"{folder}.copy")


def test_damage_at_an_address_is_found() -> None:
    folder, store = f"memory://{uuid.uuid4().hex}/one.ckpt", TorchCheckpointIO()
    saved(folder)
    file = f"{folder}/0000000a.rank1.bin"
    content = bytearray(files.read(file))
    content[3] ^= 1
    files.write(file, bytes(content))
    assert not store.is_complete(folder)
    with pytest.raises(CheckpointError, match="0000000a.rank1.bin is damaged"):
        sharded.read(folder)
    files.remove(file)
    for reading in (sharded.read, store.load_checkpoint):
        with pytest.raises(CheckpointError, match="0000000a.rank1.bin is missing"):
            reading(folder)


def test_a_save_at_an_address_that_fails_leaves_the_earlier_one() -> None:
    folder = f"memory://{uuid.uuid4().hex}/one.ckpt"
    expected = saved(folder)
    sharded.prepare(folder, new=False)
    sharded.write_tensors(folder, "0000000b.rank0.bin", [("w", WHOLE, (5, 7), ((0, 0), (5, 7)))])
    lost = part_lists.Written({"0000000b.rank1.bin": {"size": 3, "crc32": 0}})
    with pytest.raises(CheckpointError, match="rank 0 does not see 0000000b.rank1.bin"):
        sharded.commit(folder, "0000000b", {}, [lost])
    same(sharded.read(folder), expected)
    sharded.discard(folder, "0000000b")
    same(sharded.read(folder), expected)
    assert not any(name.startswith("0000000b") for name in remote.names(folder))


def test_the_files_of_a_manifest_stay_if_the_save_fails_after_it(tmp_path: Path) -> None:
    save_id, parts = "0123abcd", [("w", torch.ones(3), (3,), ((0,), (3,)))]
    written = sharded.write_tensors(tmp_path, f"{save_id}.rank0.bin", parts)
    sharded.commit(tmp_path, save_id, {"step": 1}, [written])
    sharded.discard(tmp_path, save_id)  # as when the sync of the folder fails
    assert TorchCheckpointIO().is_complete(tmp_path)
    sharded.write_tensors(tmp_path, "4567abcd.rank0.bin", parts)
    sharded.discard(tmp_path, "4567abcd")
    assert TorchCheckpointIO().is_complete(tmp_path)
    assert not list(tmp_path.glob("4567abcd.*"))


# ---- very many parts of tensors --------------------------------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process lists its parts of tensors in a file of its own, as it does if there are very many."""
    monkeypatch.setattr(part_lists, "MOST_IN_MANIFEST", 12)  # three processes have four parts at most


@pytest.mark.parametrize("folder", ["local", "address"])
@pytest.mark.usefixtures("apart")
def test_parts_that_the_manifest_does_not_list_are_read_copied_and_removed(tmp_path: Path, folder: str) -> None:
    one, other = (tmp_path / "one", tmp_path / "other") if folder == "local" else (
        f"memory://{uuid.uuid4().hex}/{name}" for name in ("one", "other")
    )  # fmt: skip
    saved(one)
    expected = saved(one, "0000000b", 1.0)
    lists = [name for name in files.names(one) if name.endswith("parts.json")]
    assert lists == ["0000000b.rank0.parts.json"]  # rank 0 has written all plain tensors too
    same(sharded.read(one), expected)
    assert sharded.copy(one, other, replaces=False)
    sharded.remove(one)
    assert not files.is_file(f"{one}/{lists[0]}")
    same(sharded.read(other), expected)
    sharded.verify(other)


@pytest.mark.usefixtures("apart")
def test_a_damaged_list_of_parts_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    (path,) = (tmp_path / "one").glob("*.parts.json")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"float64", b"float32"))
    with pytest.raises(CheckpointError, match=r"rank0\.parts\.json is damaged: its size or checksum is wrong"):
        sharded.read(tmp_path / "one")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank0\.parts\.json is missing"):
        sharded.read(tmp_path / "one")


@pytest.mark.parametrize("store", [TorchCheckpointIO, AsyncCheckpointIO])
@pytest.mark.parametrize("most", [0, 10])
def test_a_strategy_lists_very_many_parts_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any, most: int
) -> None:
    monkeypatch.setattr(part_lists, "MOST_IN_MANIFEST", most)
    strategy, path = SingleDeviceStrategy(checkpoint_io=store()), tmp_path / "a.ckpt"
    checkpoint = {"step": 3, "state_dict": {"w": WHOLE, "b": torch.ones(2)}}
    sharded_files.save(strategy, checkpoint, path)
    strategy.checkpoint_io.wait()
    strategy.checkpoint_io.teardown()
    assert len(list(path.glob("*.parts.json"))) == (most == 0)
    assert json.loads((path / "manifest.json").read_text())["version"] == (2 if most == 0 else 1)  # 1: before the lists
    same(TorchCheckpointIO().load_checkpoint(path), checkpoint)


def test_who_completes_a_checkpoint_of_very_many_processes_gets_no_list_of_their_parts(tmp_path: Path) -> None:
    """As 1,024 processes with 100 tensors each post it."""
    parts = [(f"{number}", WHOLE[:1], (1024, 7), ((0, 0), (1, 7))) for number in range(100)]
    written = sharded.write_tensors(tmp_path, "0000000a.rank0.bin", parts)
    posted = sharded.list_apart(tmp_path, "0000000a.rank0.parts.json", written, 1024)
    assert posted.tensors == {}
    assert len(json.dumps({**vars(posted)})) < 300
