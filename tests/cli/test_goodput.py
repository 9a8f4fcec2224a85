from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.loops.test_goodput import KILLED, RESUMED

from drivetrain.cli import command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps(each) for each in [*KILLED, *RESUMED]]
    (tmp_path / "ledger.jsonl").write_text("\n" + "\n".join([*lines, lines[0][:20]]))
    return tmp_path


def test_it_prints_the_parts_of_the_wall_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["goodput", str(folder)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("Goodput 72.2% of 263 s in 2 runs, 1 failed: step 72.2%, data 5.7%, ")
    assert [line.split() for line in lines[:2]] == [["step", "190.0", "s", "72.2%"], ["data", "15.0", "s", "5.7%"]]
    assert lines[-1] == "Lines left out, because they are cut or of another version: 1."


def test_it_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["goodput", str(folder / "ledger.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"] == 190 / 263
    assert sum(found["seconds"].values()) == found["wall_s"] == 263
    assert (found["failures"], found["unread"]) == (1, 1)


def test_where_there_is_no_ledger_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["goodput", str(tmp_path)]) == 2
    assert "ledger.jsonl cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a checkpoint\n\n\xff"])
def test_a_file_without_a_record_is_no_ledger(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fit.ckpt").write_bytes(content)
    assert command.main(["goodput", str(tmp_path / "fit.ckpt"), "--json"]) == 2
    shown = capsys.readouterr()
    assert "fit.ckpt has no record of a run" in shown.err
    assert json.loads(shown.out) == {"error": shown.err.rstrip("\n")}


def test_an_address_is_no_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["goodput", "s3://bucket/run"]) == 2
    assert "s3://bucket/run is an address, and a ledger is a local file." in capsys.readouterr().err
