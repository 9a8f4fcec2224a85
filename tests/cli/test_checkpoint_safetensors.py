"""Files of safetensors, and folders as Hugging Face keeps models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import CheckedNet, answer, loaded, run, trained


def needs_safetensors() -> Any:
    return pytest.importorskip("safetensors", reason="the package safetensors is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


def test_a_model_folder_is_split_into_files_with_an_index(model: Path, tmp_path: Path, capsys: Any) -> None:
    needs_safetensors()
    options = ("--to", "huggingface", "--max-file-size", "0.0000002")
    said = answer(capsys, "convert", model, tmp_path / "hub", *options)
    assert any(note.startswith("config.json is not written") for note in said["notes"])
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "again.weight" not in index["weight_map"]  # tied to first.weight, which has the same memory
    assert run(capsys, "diff", model, tmp_path / "hub")[0] == 0
    next((tmp_path / "hub").glob("model-00001*")).unlink()
    assert run(capsys, "verify", tmp_path / "hub")[0] == 1


def test_without_safetensors_the_error_says_what_to_install(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, said = run(capsys, "convert", model, tmp_path / "x.safetensors", "--to", "safetensors")
    assert (code, "pip install safetensors" in said) == (2, True)


def test_other_programs_read_the_file_and_theirs_is_read(model: Path, tmp_path: Path, capsys: Any) -> None:
    needs_safetensors()
    from safetensors.torch import load_file, save_file

    run(capsys, "convert", model, tmp_path / "ours.safetensors", "--to", "safetensors")
    weights = loaded(model)["state_dict"]
    found = load_file(tmp_path / "ours.safetensors")
    assert weights.keys() - found.keys() == {"again.weight"}  # tied
    torch.testing.assert_close(found, {name: weights[name] for name in found}, rtol=0, atol=0, equal_nan=True)
    save_file({name: each.contiguous() for name, each in found.items()}, tmp_path / "theirs.safetensors")
    compared = answer(capsys, "diff", tmp_path / "theirs.safetensors", model)
    assert (compared["only_in_a"], compared["only_in_b"]) == ([], ["state_dict/again.weight"])
    assert compared["tensors"] == []


def test_a_folder_of_pickles_is_read_without_unpickling(tmp_path: Path, capsys: Any) -> None:
    state = CheckedNet().state_dict()
    halves = dict(list(state.items())[:5]), dict(list(state.items())[5:])
    (tmp_path / "hub").mkdir()
    for index, half in enumerate(halves):
        torch.save(half, tmp_path / "hub" / f"pytorch_model-{index}.bin")
    where = {name: f"pytorch_model-{index}.bin" for index, half in enumerate(halves) for name in half}
    (tmp_path / "hub" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert answer(capsys, "inspect", tmp_path / "hub")["kind"] == "huggingface"
    assert run(capsys, "convert", tmp_path / "hub", tmp_path / "one.ckpt", "--to", "drivetrain")[0] == 0
    assert loaded(tmp_path / "one.ckpt")["state_dict"].keys() == state.keys()
    index = {"weight_map": {**where, "w": "../other.bin"}}
    (tmp_path / "hub" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    code, _, said = run(capsys, "inspect", tmp_path / "hub")
    assert (code, "'../other.bin', which is not in the folder" in said) == (2, True)
