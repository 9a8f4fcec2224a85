"""The command ``drivetrain report``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.command import main as drivetrain
from drivetrain.report.command import main
from drivetrain.report.run_file import load

Make = Callable[..., Path]


def test_the_page_is_in_the_run_s_folder_or_where_output_says(make_run: Make, tmp_path: Path, capsys: Any) -> None:
    folder = make_run()
    assert drivetrain(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert capsys.readouterr().out == (
        "Finished after 2 epochs, 1000 steps in 1 min 40 s: max_epochs=2 is reached.\n"
        f"Report: {folder / 'report.html'} ({len(page) / 1000:.0f} kB)\n"
    )
    assert main([str(folder / "run.json"), "--output", str(tmp_path / "own.html")]) == 0
    assert (tmp_path / "own.html").read_text() == page


def test_the_newest_of_several_runs_is_named(make_run: Make, tmp_path: Path, capsys: Any) -> None:
    make_run("logs/version_0")
    newest = make_run("logs/version_1")
    assert main([str(tmp_path)]) == 0
    assert f"has 2 runs; this is the newest, {newest}." in capsys.readouterr().err


def test_nothing_to_read_is_2(tmp_path: Path, make_run: Make, capsys: Any) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no run in it" in capsys.readouterr().err
    assert main([str(make_run()), "--output", str(tmp_path / "gone" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    run = make_run("other")
    for folder in (tmp_path, Path("/")):
        assert main([str(run), "--output", str(folder)]) == 2
        assert f"{folder} is a folder. Pass a file, such as --output " in capsys.readouterr().err


def test_a_file_that_is_not_of_a_run_is_not_reported(make_run: Make, capsys: Any) -> None:
    (other := make_run() / "train.py").touch()
    assert main([str(other)]) == 2
    assert f"{other} is no run.json" in capsys.readouterr().err
    assert not (other.parent / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--max-slower", "5%"], "--max-slower compares two runs"),
        (["a", "b", "--max-slower", "5"], "got '5', and a percentage is expected, such as 5%"),
        (["a", "b", "c"], "there are 3 runs, and two can be compared"), ([], "RUN"),
    ],
)  # fmt: skip
def test_wrong_usage_is_2(arguments: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "code"), [(104.9, 0), (105.1, 1), (10.0, 0)])
def test_max_slower_is_an_exit_code(make_run: Make, seconds: float, code: int) -> None:
    first, second = make_run("first"), make_run("second", {"seconds": seconds})
    assert main([str(first), str(second), "--max-slower", "5%"]) == code
    assert main([str(first), str(second)]) == 0


def test_max_slower_without_a_known_time_is_2(make_run: Make, capsys: Any) -> None:
    first, second = make_run("first"), make_run("second", {"status": "running", "seconds": None})
    assert main([str(first), str(second), "--max-slower", "5%"]) == 2
    assert "both runs need a run.json of a fit that has ended" in capsys.readouterr().err
    assert main([str(first), str(second), "--max-slower", "5%", "--json"]) == 2
    assert [*json.loads(capsys.readouterr().out)] == ["error"]


def test_json_has_what_the_page_has_and_a_version(make_run: Make, capsys: Any) -> None:
    folder = make_run(rows={"loss": [1.0, float("nan")], "norm": [float("inf")] * 2})
    assert main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    (run,) = found["runs"]
    assert (found["schema"], found["differences"]) == (1, None)
    assert run["curves"] == {"loss": [[0, 1.0], [10, None]], "norm": [[0, None], [10, None]]}
    assert run["values"]["norm"]["last"] is None
    assert run["attempts"] == load(folder / "run.json")["attempts"]
    assert run["seconds_per_step"] == 0.1
    assert not (folder / "report.html").exists()


def test_json_of_two_runs_has_their_differences(make_run: Make, capsys: Any) -> None:
    first = make_run("first")
    second = make_run("second", {"settings": {"max_epochs": "3", "precision": "'16'"}, "seconds": 200.0})
    (first / "hparams.yaml").write_text("lr: 1\nwidth: 2\n")
    (second / "hparams.yaml").write_text("lr: 3\nwidth: 2\n")
    assert main([str(first), str(second), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["differences"]
    assert found["Settings"] == {"max_epochs": ["2", "3"], "precision": ["", "'16'"]}
    assert (found["Plan"], found["Environment"], found["Code"]) == ({}, {}, {})
    assert found["Hyperparameters"][1:] == ["-lr: 1", "+lr: 3"]
    assert found["Speed"] == {"seconds_per_step": [0.1, 0.2], "slower": 1.0}
    assert [each["last"] for each in found["Values"]["val_loss"]] == [3.0, 3.0]


def test_two_runs_make_one_page_that_begins_with_their_speed(make_run: Make) -> None:
    first, second = make_run("first"), make_run("second", {"seconds": 150.0, "settings": {}})
    assert main([str(first), str(second)]) == 0
    page = (second / "comparison.html").read_text()
    texts = [each for each in re.sub(r"(?s)<style>.*?</style>|<[^>]*>", "\n", page).split("\n") if each]
    assert texts[3] == "A step of B takes 50.0% longer than one of A."
    assert {"train_loss (A)", "train_loss (B)", "default"} <= {*texts}
    assert texts[-1] == "Plan, Environment, Code, Hyperparameters"
