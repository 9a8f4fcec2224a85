"""The command ``drivetrain checkpoint``: its help, its errors, and where its subcommands are tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.checkpoints import run

from drivetrain.cli.command import main

COMMANDS = ["inspect", "verify", "diff", "convert", "consolidate", "prune"]


def test_help_lists_the_subcommands(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert [name for name in COMMANDS if f"\n    {name}" not in said] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_an_error_is_printed_and_the_exit_code_is_2(tmp_path: Path, capsys: Any, name: str) -> None:
    missing = str(tmp_path / "missing")
    further = {"diff": [missing], "convert": [missing, "--to", "dcp"], "consolidate": [missing]}.get(name, [])
    code, out, said = run(capsys, name, missing, *further)
    assert (code, out) == (2, "")
    assert said.startswith(f"drivetrain checkpoint {name}: ")
    assert missing in said
    code, out, _ = run(capsys, name, missing, *further, "--json")
    assert (code, [*json.loads(out)]) == (2, ["error"])


def test_any_other_exception_is_an_error_too(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    def fail(**_: Any) -> None:
        raise NotImplementedError("nothing for sparse tensors")

    monkeypatch.setattr("drivetrain.cli.checkpoint_diff.diff", fail)
    code, out, said = run(capsys, "diff", "a", "b", "--json")
    assert (code, json.loads(out)) == (2, {"error": "NotImplementedError: nothing for sparse tensors"})
    assert said == "drivetrain checkpoint diff: NotImplementedError: nothing for sparse tensors\n"


def test_numbers_that_json_lacks_are_strings(capsys: Any, monkeypatch: Any) -> None:
    found = {"equal": True, "values": [float("nan"), 1.5], "other": float("inf")}
    monkeypatch.setattr("drivetrain.cli.checkpoint_diff.diff", lambda **_: found)
    _, out, _ = run(capsys, "diff", "a", "b", "--json")
    assert json.loads(out, parse_constant=pytest.fail) == {"equal": True, "values": ["nan", 1.5], "other": "inf"}


def test_names_cannot_control_the_terminal(tmp_path: Path, capsys: Any) -> None:
    torch.save({"\x1b[31mred\nline": torch.ones(1), "\ud800": torch.ones(1), "größe": torch.ones(1)}, tmp_path / "a.pt")
    code, out, _ = run(capsys, "inspect", tmp_path / "a.pt", "--tensors")
    assert code == 0
    assert [
        name for name in (r"\x1b[31mred\nline", r"\ud800", "größe") if f"state_dict/{name}  float32" not in out
    ] == []


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_file_size_is_above_zero(tmp_path: Path, capsys: Any, size: str) -> None:
    code, _, said = run(capsys, "convert", "a", "b", "--to", "huggingface", f"--max-file-size={size}")
    assert (code, "is a number of GB above 0" in said) == (2, True)
