"""``drivetrain checkpoint verify``: one changed bit in any file of any kind is found, and its place is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import answer, bytes_of, flipped, loaded, run, shards_of, trained

from drivetrain.checkpoints.container import write
from drivetrain.strategies.rank_files import entry_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


def made(model: Path, folder: Path, kind: str, capsys: Any) -> tuple[Path, Path]:
    """A checkpoint, and the file of it that holds the weight of the last layer."""
    path = folder / "checkpoint"
    if kind == "file":
        shutil.copy(model, path)
    elif kind == "shards":
        return shards_of(loaded(model), path), path / "0000000a.rank0.bin"
    else:
        run(capsys, "convert", model, path, "--to", kind)
    return path, path / "__0_0.distcp" if kind == "dcp" else path


@pytest.mark.parametrize(
    ("kind", "record"),
    [("file", "checksum of '.*/data/"), ("shards", "checksum of model.last.weight"),
     ("lightning", "checksum of '.*/data/"), ("dcp", "checksum of 'model.last.weight'")],
)  # fmt: skip
def test_a_changed_bit_is_found_and_named(model: Path, tmp_path: Path, capsys: Any, kind: str, record: str) -> None:
    path, file = made(model, tmp_path, kind, capsys)
    code, out, _ = run(capsys, "verify", path)
    assert (code, out) == (0, f"{path}: complete and undamaged\n")
    assert answer(capsys, "verify", path)["problems"] == []
    weight = bytes_of(loaded(model)["state_dict"]["last.weight"])
    flipped(file, weight[: len(weight) // 2])  # the first process has written the first half
    code, out, _ = run(capsys, "verify", path)
    assert code == 1
    assert re.search(f"{re.escape(str(file))} is damaged: the {record}", out)
    found = answer(capsys, "verify", path)
    assert (found["ok"], len(found["problems"])) == (False, 1)


@pytest.mark.parametrize("kind", ["file", "shards", "dcp"])
def test_a_file_that_was_cut_short_is_found(model: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    path, file = made(model, tmp_path, kind, capsys)
    file.write_bytes(file.read_bytes()[:-200])
    assert run(capsys, "verify", path)[0] == 1


def test_every_file_of_a_folder_is_compared(model: Path, tmp_path: Path, capsys: Any) -> None:
    folder = shards_of(loaded(model), tmp_path / "shards")
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert run(capsys, "verify", folder)[0] == 1, file
        file.write_bytes(content)
    assert run(capsys, "verify", folder)[0] == 0
    (folder / "manifest.json").unlink()
    code, out, _ = run(capsys, "verify", folder)
    assert (code, "so no save to it was finished" in out) == (1, True)


def test_rank_files_belong_to_the_checkpoint(model: Path, tmp_path: Path, capsys: Any) -> None:
    beside = tmp_path / "model.ckpt.0000000a.rank1"
    with beside.open("wb") as stream:
        write({"rng": torch.ones(3)}, stream)
    with (tmp_path / "model.ckpt").open("wb") as stream:
        write({**loaded(model), "rank_files": [entry_of(str(beside), [1])]}, stream)
    assert run(capsys, "verify", tmp_path / "model.ckpt")[0] == 0
    assert answer(capsys, "inspect", tmp_path / "model.ckpt")["processes"] == 2
    content = beside.read_bytes()
    beside.write_bytes(content[:-1] + b"x")
    code, out, _ = run(capsys, "verify", tmp_path / "model.ckpt")
    assert (code, f"{beside} is damaged: its checksum is wrong" in out) == (1, True)
    beside.unlink()
    code, out, _ = run(capsys, "verify", tmp_path / "model.ckpt")
    assert (code, f"{beside} is missing" in out) == (1, True)


def test_a_rank_file_that_a_store_has_written_elsewhere_must_be_there_too(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    """Such an entry has no checksum; the files were downloaded."""
    name = "model.ckpt.0000000a.rank1"
    torch.save({**loaded(model), "rank_files": [{"name": name, "ranks": [1]}]}, tmp_path / "model.ckpt")
    code, out, _ = run(capsys, "verify", tmp_path / "model.ckpt")
    assert (code, f"{tmp_path / name} is missing" in out) == (1, True)
    torch.save({}, tmp_path / name)
    assert run(capsys, "verify", tmp_path / "model.ckpt")[0] == 0


@pytest.mark.parametrize("entry", [3, None, {}, {"name": 3}])
def test_an_entry_of_no_rank_file_is_described(model: Path, tmp_path: Path, capsys: Any, entry: Any) -> None:
    torch.save({**loaded(model), "rank_files": [entry]}, tmp_path / "model.ckpt")
    assert run(capsys, "verify", tmp_path / "model.ckpt")[0] == 1
    code, _, said = run(capsys, "inspect", tmp_path / "model.ckpt")
    assert (code, "The checkpoint's entry for rank_files is damaged, or another program wrote it" in said) == (2, True)


def test_formats_without_checksums_are_said(tmp_path: Path, capsys: Any, model: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert answer(capsys, "verify", tmp_path / "old.pt")["notes"] == [
        "torch's format from before 1.6 has no checksums: only its sizes and its structure were checked"
    ]
    pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    path = tmp_path / "model.safetensors"
    run(capsys, "convert", model, path, "--to", "safetensors")
    found = answer(capsys, "verify", path)
    assert (found["ok"], found["notes"][0].startswith("safetensors has no checksums")) == (True, True)
    path.write_bytes(path.read_bytes()[:-1])
    assert run(capsys, "verify", path)[0] == 1


def test_the_note_on_safetensors_is_only_for_its_files(tmp_path: Path, capsys: Any) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    found = answer(capsys, "verify", tmp_path)
    assert (found["kind"], found["ok"], found["notes"]) == ("huggingface", True, [])
