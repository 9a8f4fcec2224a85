"""Every kind of checkpoint is recognized, and whatever a damaged file holds, the answer is a message."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import Harmful, answer, loaded, run, shards_of, trained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("to", ["lightning", "dcp", "safetensors", "huggingface"])
def test_other_formats_are_recognized(model: Path, tmp_path: Path, capsys: Any, to: str) -> None:
    if to in ("safetensors", "huggingface"):
        pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    other = tmp_path / ("other.safetensors" if to == "safetensors" else "other")
    run(capsys, "convert", model, other, "--to", to)
    found = answer(capsys, "inspect", other)
    assert found["kind"] == to
    assert found["weights"] == answer(capsys, "inspect", model)["weights"]


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
        ("empty", b"", "is no checkpoint"),
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
    for command in ("inspect", "verify"):  # which has not found damage
        code, _, said = run(capsys, command, tmp_path / name)
        assert code == 2
        assert text in said
        assert "mmap" not in said
    code, _, said = run(capsys, "inspect", tmp_path)
    assert (code, "is a folder of no known kind" in said) == (2, True)
    code, _, said = run(capsys, "inspect", "s3://bucket/model.ckpt")
    assert (code, "reads local files. Download it first" in said) == (2, True)


def test_a_pipe_and_a_file_without_permission_are_not_opened(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "locked").write_bytes(b"")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read every file
    for command in ("inspect", "verify"):
        code, _, said = run(capsys, command, tmp_path / "pipe")
        assert (code, "is a pipe" in said) == (2, True)
        code, _, said = run(capsys, command, tmp_path / "locked")
        assert (code, "you have no permission" in said) == (2, True)


@pytest.mark.parametrize("kind", ["file", "shards", "lightning", "dcp"])
def test_random_damage_ends_in_a_message(model: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    path = tmp_path / "checkpoint"
    if kind == "shards":
        shards_of(loaded(model), path)
    else:
        run(capsys, "convert", model, path, "--to", {"file": "drivetrain"}.get(kind, kind))
    draw = random.Random(7)
    for _ in range(25):
        file = draw.choice([each for each in path.iterdir() if each.is_file()]) if path.is_dir() else path
        content = file.read_bytes()
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 20)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        file.write_bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
        for command in (["inspect", path], ["verify", path], ["diff", path, model]):
            assert run(capsys, *command)[0] in (0, 1, 2)
        file.write_bytes(content)
    assert run(capsys, "verify", path)[0] == 0
