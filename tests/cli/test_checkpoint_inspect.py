"""``drivetrain checkpoint inspect``: every kind of checkpoint is recognized, and no tensor is read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import CheckedNet, Harmful, answer, loaded, run, shards_of, trained

from drivetrain import Callback
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import sharded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


def test_a_file_is_described(model: Path, capsys: Any) -> None:
    found = answer(capsys, "inspect", model, "--tensors")
    assert {key: found[key] for key in ("kind", "epoch", "global_step", "processes", "lr_schedulers", "notes")} == {
        "kind": "drivetrain", "epoch": 2, "global_step": 8, "processes": 1, "lr_schedulers": 1, "notes": [],
    }  # fmt: skip
    assert found["resume"] == {"possible": True, "inside_epoch": False, "processes": "any", "reason": ""}
    assert found["bytes"] == model.stat().st_size
    assert found["written_by"]["torch"] == torch.__version__
    weights = loaded(model)["state_dict"].values()
    assert found["weights"]["tensors"] == len(weights)
    assert found["weights"]["bytes"] == sum(each.nbytes for each in weights)
    assert found["weights"]["elements_by_dtype"]["bfloat16"] == 3
    assert found["optimizers"] == [
        {"class": "Adam", "parameters_by_group": [5], "state": ["exp_avg", "exp_avg_sq", "step"]}
    ]
    assert found["callbacks"][0].startswith("ModelCheckpoint")
    assert found["hyper_parameters"] == ["width", "folder"]
    assert {"name": "state_dict/turned", "shape": [3, 2], "dtype": "float32", "bytes": 24} in found["tensors"]
    assert answer(capsys, "inspect", model, "--tensors") == found


def test_the_lines_for_people_say_the_same(model: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, "inspect", model, "--tensors")
    assert code == 0
    for text in (
        f"{model}: checkpoint of drivetrain, one file, ", "epoch 2, step 8", "at the end of an epoch, with any number",
        "elements: bfloat16 3, float32 ", "Adam of 5 parameters, state exp_avg, exp_avg_sq, step", "width, folder",
        "state_dict/turned  float32 [3, 2]  24 bytes",
    ):  # fmt: skip
        assert text in out


class SavesInside(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)


def test_a_checkpoint_from_inside_an_epoch_needs_as_many_processes(tmp_path: Path, capsys: Any) -> None:
    trained(tmp_path, callbacks=[SavesInside(tmp_path / "inside.ckpt"), ModelCheckpoint(tmp_path / "runs")])
    found = answer(capsys, "inspect", tmp_path / "inside.ckpt")
    assert found["resume"] == {"possible": True, "inside_epoch": True, "processes": 1, "reason": ""}
    assert found["batches_done_in_epoch"] == 2
    assert "2 batches of the epoch done" in run(capsys, "inspect", tmp_path / "inside.ckpt")[1]


def test_weights_alone_cannot_be_resumed(tmp_path: Path, capsys: Any) -> None:
    torch.save(CheckedNet().state_dict(), tmp_path / "weights.pt")
    found = answer(capsys, "inspect", tmp_path / "weights.pt")
    assert (found["kind"], found["resume"]["possible"]) == ("torch", False)
    assert "no: it holds only weights" in run(capsys, "inspect", tmp_path / "weights.pt")[1]


@pytest.mark.parametrize("to", ["lightning", "dcp", "safetensors", "huggingface"])
def test_other_formats_are_recognized(model: Path, tmp_path: Path, capsys: Any, to: str) -> None:
    if to in ("safetensors", "huggingface"):
        pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    other = tmp_path / ("other.safetensors" if to == "safetensors" else "other")
    run(capsys, "convert", model, other, "--to", to)
    found = answer(capsys, "inspect", other)
    assert found["kind"] == to
    assert found["weights"] == answer(capsys, "inspect", model)["weights"]


def test_no_tensor_of_a_folder_is_read(model: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    folder = shards_of(loaded(model), tmp_path / "shards")
    expected = answer(capsys, "inspect", model, "--tensors")

    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(sharded.StoredTensor, "_read", refuse)
    found = answer(capsys, "inspect", folder, "--tensors")
    assert (found["kind"], found["files"]) == ("drivetrain-sharded", 4)
    assert found["tensors"] == expected["tensors"]


def test_no_tensor_of_a_file_is_read(tmp_path: Path, capsys: Any) -> None:
    """The bytes of the tensors are damaged, which nobody notices who does not read them."""
    torch.save({"weight": torch.full((1000,), 3.0)}, tmp_path / "model.pt")
    content = bytearray((tmp_path / "model.pt").read_bytes())
    at = content.find(torch.full((10,), 3.0).numpy().tobytes())
    content[at] ^= 1
    (tmp_path / "model.pt").write_bytes(content)
    assert answer(capsys, "inspect", tmp_path / "model.pt")["weights"]["elements"] == 1000
    assert run(capsys, "verify", tmp_path / "model.pt")[0] == 1  # the control


def test_objects_in_a_file_are_left_out_and_named_and_do_not_run(tmp_path: Path, capsys: Any) -> None:
    content = {
        "state_dict": {"w": torch.ones(2)},
        "pytorch-lightning_version": "1.9.0",
        "own": Harmful(tmp_path / "harm"),
    }
    torch.save(content, tmp_path / "old.ckpt")
    found = answer(capsys, "inspect", tmp_path / "old.ckpt")
    assert found["kind"] == "lightning"
    assert found["notes"] == ["objects that are no plain data are left out: own (posix.mkdir)"]
    assert not (tmp_path / "harm").exists()
    torch.load(tmp_path / "old.ckpt", weights_only=False)  # the control
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("text", b"no checkpoint", "is no checkpoint"),
        ("list", [1, 2], "holds a list and no dictionary"),
        ("other", {"a": 1}, "has no weights under 'state_dict', 'model'"),
    ],
)
def test_what_is_no_checkpoint_is_said(tmp_path: Path, capsys: Any, name: str, content: Any, text: str) -> None:
    if not isinstance(content, bytes):
        stream = io.BytesIO()
        torch.save(content, stream)
        content = stream.getvalue()
    (tmp_path / name).write_bytes(content)
    code, _, said = run(capsys, "inspect", tmp_path / name)
    assert code == 2
    assert text in said
    code, _, said = run(capsys, "inspect", tmp_path)
    assert (code, "is a folder of no known kind" in said) == (2, True)
    code, _, said = run(capsys, "inspect", "s3://bucket/model.ckpt")
    assert (code, "reads local files. Download it first" in said) == (2, True)
