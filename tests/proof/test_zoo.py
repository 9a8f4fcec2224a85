"""What prove-resume says of programs that resume exactly, and of the same programs with one fault each.

That they do, and do not, is judged in zoo.py, with none of the prover's means.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.proof import zoo

from drivetrain.proof import command

LONG = os.environ.get("DRIVETRAIN_FAULTS") == "long"
HERE = Path(__file__).parent
RIGHT = zoo.RIGHT if LONG else ["drivetrain_trainer", "lbfgs", "new_model", "workers"]
FAULTS = sorted(zoo.FAULTS)
SHORT = [("csv_log", "logger_step"), ("scaler", "scaler"), ("shuffled", "shuffled_twice")]
KILLS = 5 if LONG else 2


@pytest.mark.parametrize("name", RIGHT)
def test_a_program_that_resumes_exactly_is_acquitted(name: str, prove: Callable[..., Any]) -> None:
    resume = zoo.RESUME_ARGUMENTS.get(name)
    proof = prove(
        *(["--resume-args", resume] if resume else []), "--kills", str(KILLS), HERE / "programs" / f"{name}.py"
    )
    assert (proof.code, proof.differences) == (0, []), proof.message
    assert len(proof.continued_at) == KILLS
    assert f"{KILLS} kills" in proof.message


@pytest.mark.parametrize(("name", "fault"), FAULTS if LONG else SHORT)
def test_a_planted_fault_is_named_at_the_first_step_where_it_shows(
    name: str, fault: str, prove: Callable[..., Any]
) -> None:
    proof = prove("--kills", str(KILLS), HERE / "programs" / f"{name}.py", "--fault", fault)
    assert proof.code == 1
    step, part, detail, _ = proof.differences[0]
    assert f"{part}: {detail}".startswith(zoo.FAULTS[name, fault]), proof.message
    if part not in zoo.SEEN_AFTER_THE_STEPS:
        assert step in proof.continued_at, proof.message


@pytest.mark.timeout(600)
@pytest.mark.skipif(not LONG, reason="torchrun starts interpreters: make test-faults")
def test_a_fault_of_one_rank_is_named_with_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["--ranks", "2", "--kills", "2", "--seed", "1", str(HERE / "ranks" / "ddp.py")]
    assert command.main(words) == 0
    assert command.main([*words, "--fault", "rank_random"]) == 1
    assert "random state on rank 1" in capsys.readouterr().out


# ---- the programs themselves, without the prover ---------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.RIGHT if LONG else ["shuffled"])
def test_a_right_program_does_resume_exactly(name: str, programs: Any, tmp_path: Path) -> None:
    undisturbed = zoo.lives(programs, name, tmp_path / "undisturbed", [])
    disturbed = zoo.lives(programs, name, tmp_path / "killed", [9, 3, 11])
    assert len(undisturbed) >= 30
    assert len(disturbed) > len(undisturbed)  # some steps twice
    assert zoo.differences(undisturbed, disturbed, tmp_path / "undisturbed", tmp_path / "killed") == []


@pytest.mark.parametrize(("name", "fault"), FAULTS if LONG else [("shuffled", "sampler_seed")])
def test_a_faulty_program_does_not(name: str, fault: str, programs: Any, tmp_path: Path) -> None:
    kills = [63] if fault == "best_metric" else [9, 3, 11]  # the best is not the newest after step 48
    undisturbed = zoo.lives(programs, name, tmp_path / "undisturbed", [], "--fault", fault)
    disturbed = zoo.lives(programs, name, tmp_path / "killed", kills, "--fault", fault)
    assert zoo.differences(undisturbed, disturbed, tmp_path / "undisturbed", tmp_path / "killed")
