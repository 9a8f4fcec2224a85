"""Folders of torch.distributed.checkpoint: torch's, Lightning's and ours, and what they may not do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import DATA, CheckedNet, Harmful, answer, loaded, quiet, run, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The checkpoint holds the state of callbacks that this Trainer does not have"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


def test_torch_reads_the_folder_that_is_written(model: Path, tmp_path: Path, capsys: Any) -> None:
    from torch.distributed import checkpoint as dcp

    notes = answer(capsys, "convert", model, tmp_path / "dcp", "--to", "dcp")["notes"]
    assert notes == ["tied weights become separate tensors: again.weight had the memory of others"]
    weights = {"model": {name: torch.zeros_like(each) for name, each in loaded(model)["state_dict"].items()}}
    dcp.load(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.testing.assert_close(weights["model"], loaded(model)["state_dict"], rtol=0, atol=0, equal_nan=True)


def test_folders_of_torch_and_of_lightning_are_read(model: Path, tmp_path: Path, capsys: Any) -> None:
    from torch.distributed import checkpoint as dcp

    tree = loaded(model)
    named = dict(tree["state_dict"])
    dcp.save({"app": {"model": named, "step": 3}}, checkpoint_id=tmp_path / "app", no_dist=True)
    said = answer(capsys, "consolidate", tmp_path / "app", tmp_path / "app.ckpt")
    assert said["lost"] == ["step"]
    assert answer(capsys, "diff", "--weights", tmp_path / "app.ckpt", model)["equal"]
    # Lightning's: optimizer states by name in the folder, and the rest in meta.pt
    names = [name for group in tree["optimizers"][0]["parameters"] for name in group]
    state = {names[number]: each for number, each in tree["optimizer_states"][0]["state"].items()}
    groups = [{**tree["optimizer_states"][0]["param_groups"][0], "params": names}]
    content = {"model": named, "optimizer_0": {"state": state, "param_groups": groups}}
    dcp.save(content, checkpoint_id=tmp_path / "fabric", no_dist=True)
    run(capsys, "convert", model, tmp_path / "light.ckpt", "--to", "lightning")
    apart = ("state_dict", "optimizer_states")
    beside = {key: each for key, each in loaded(tmp_path / "light.ckpt").items() if key not in apart}
    torch.save(beside, tmp_path / "fabric" / "meta.pt")
    assert run(capsys, "consolidate", tmp_path / "fabric", tmp_path / "one.ckpt")[0] == 0
    found = loaded(tmp_path / "one.ckpt")
    torch.testing.assert_close(
        found["optimizer_states"][0]["state"], tree["optimizer_states"][0]["state"], rtol=0, atol=0
    )
    trainer = quiet(max_epochs=3, enable_checkpointing=False)
    trainer.fit(CheckedNet(), DATA, ckpt_path=tmp_path / "one.ckpt")
    assert trainer.global_step == 12


@pytest.mark.parametrize("place", ["metadata", "item"])
def test_a_harmful_pickle_in_a_folder_does_not_run(tmp_path: Path, capsys: Any, place: str) -> None:
    from torch.distributed import checkpoint as dcp

    harm = Harmful(tmp_path / "harmed")
    content: dict[str, Any] = {"model": {"w": torch.ones(2)}}
    if place == "item":
        content["harm"] = harm
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    if place == "metadata":
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(harm))
    for command in (["inspect"], ["verify"], ["convert", tmp_path / "out", "--to", "drivetrain"]):
        run(capsys, command[0], tmp_path / "dcp", *command[1:])
    assert not (tmp_path / "harmed").exists()
    pickle.loads(pickle.dumps(harm))  # the control
    assert (tmp_path / "harmed").exists()


def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, capsys: Any) -> None:
    from torch.distributed import checkpoint as dcp

    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = tmp_path / "dcp" / ".metadata"
    content = metadata.read_bytes()
    (tmp_path / "a.distcp").write_bytes((tmp_path / "dcp" / "__0_0.distcp").read_bytes())
    assert len("../.a.distcp") == len("__0_0.distcp")
    metadata.write_bytes(content.replace(b"__0_0.distcp", b"../.a.distcp"))
    code, _, said = run(capsys, "inspect", tmp_path / "dcp")
    assert (code, "../.a.distcp is outside of the folder" in said) == (2, True)


def test_conjugate_and_negative_views_keep_their_values(tmp_path: Path, capsys: Any) -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j])
    torch.save({"conjugate": whole.conj(), "negative": whole.clone().conj().imag}, tmp_path / "views.pt")
    assert run(capsys, "convert", tmp_path / "views.pt", tmp_path / "dcp", "--to", "dcp")[0] == 0
    assert run(capsys, "consolidate", tmp_path / "dcp", tmp_path / "one.ckpt")[0] == 0
    back = loaded(tmp_path / "one.ckpt")["state_dict"]
    assert (back["conjugate"].tolist(), back["negative"].tolist()) == ([1 - 2j, 3 + 4j], [-2.0, 4.0])
