"""``drivetrain checkpoint inspect``: every kind of checkpoint is recognized, and no tensor is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import DATA, CheckedNet, answer, loaded, quiet, run, shards_of, trained
from torch.utils.data import DataLoader

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


UNCOUNTED = "its position in the data counts no samples"


class SavesInEpoch(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)


def test_a_position_that_counts_no_samples_needs_as_many_processes(tmp_path: Path, capsys: Any) -> None:
    trained(tmp_path, callbacks=[SavesInEpoch(tmp_path / "inside.ckpt"), ModelCheckpoint(tmp_path / "runs")])
    found = answer(capsys, "inspect", tmp_path / "inside.ckpt")
    assert found["resume"] == {"possible": True, "inside_epoch": True, "processes": 1, "reason": UNCOUNTED}
    assert found["batches_done_in_epoch"] == 2
    text = run(capsys, "inspect", tmp_path / "inside.ckpt")[1]
    assert "2 batches of the epoch done" in text
    assert f"inside an epoch, with one process: {UNCOUNTED}" in text


def test_a_position_in_a_data_loader_is_one_for_any_number_of_processes(tmp_path: Path, capsys: Any) -> None:
    loader = DataLoader(torch.cat(DATA), batch_size=8)
    quiet(max_epochs=2, callbacks=[SavesInEpoch(tmp_path / "inside.ckpt")]).fit(CheckedNet(), loader)
    found = answer(capsys, "inspect", tmp_path / "inside.ckpt")
    assert found["resume"] == {"possible": True, "inside_epoch": True, "processes": "any", "reason": ""}
    assert "inside an epoch, with any number of processes" in run(capsys, "inspect", tmp_path / "inside.ckpt")[1]


def test_weights_alone_cannot_be_resumed(tmp_path: Path, capsys: Any) -> None:
    torch.save(CheckedNet().state_dict(), tmp_path / "weights.pt")
    found = answer(capsys, "inspect", tmp_path / "weights.pt")
    assert (found["kind"], found["resume"]["possible"]) == ("torch", False)
    assert "no: it holds only weights" in run(capsys, "inspect", tmp_path / "weights.pt")[1]


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


def test_a_checkpoint_of_another_program_is_not_called_weights(tmp_path: Path, capsys: Any) -> None:
    state = {"model": {"w": torch.ones(2), "sparse": torch.eye(3).to_sparse()}, "optimizer": {"state": {}}, "epoch": 3}
    torch.save(state, tmp_path / "other.pt")
    code, out, _ = run(capsys, "inspect", tmp_path / "other.pt")
    assert code == 0
    assert "no: no Trainer has saved it" in out
    assert "epoch 3\n" in out
    assert answer(capsys, "inspect", tmp_path / "other.pt")["weights"]["bytes"] == 4 * 11
