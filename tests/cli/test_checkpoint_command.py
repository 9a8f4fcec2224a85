"""The command ``drivetrain checkpoint``: its help, its errors, and where its subcommands are tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
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
