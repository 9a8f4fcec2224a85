"""Each check runs in processes of its own: what goes wrong there is a finding."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.base.registry import load
from drivetrain.doctor.checks import Check, run
from drivetrain.doctor.command import CHECKS

SEEDED = """
import os, threading

def right():
    print("noise on standard output")
    yield "all is well"

def raises():
    yield "a fact before"
    raise RuntimeError("the driver\\n  hung")

def hangs():
    yield "a fact before"
    threading.Event().wait()

def dies():
    os.write(2, b"Illegal instruction in a kernel\\n")
    os._exit(3)

def hears():
    import signal
    yield f"Ctrl-C is blocked: {signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())}"

def shares(rank, folder):
    yield f"rank {rank} of {os.path.isdir(folder)}"
    yield "seen by both"
"""


@pytest.fixture
def seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seeded_checks.py").write_text(SEEDED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_entry_leads_to_a_function(check: Check) -> None:
    assert callable(load(check.function))


@pytest.mark.usefixtures("seeded")
def test_a_check_without_faults_has_facts_only(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(Check("right", "seeded_checks:right", 60))
    assert (result.facts, result.findings) == (["all is well"], [])
    assert result.seconds > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(
    ("name", "seconds", "what"),
    [
        ("raises", 60, "The check 'raises' raised RuntimeError: the driver hung."),
        ("dies", 60, "The check 'dies' lost its process, which ended with exit code 3: Illegal instruction in"),
        ("hangs", 3, "The check 'hangs' did not end within 3 s."),
        ("missing", 60, "The check 'missing' raised AttributeError: "),
    ],
)  # fmt: skip
def test_a_check_that_fails_is_a_finding_and_keeps_its_facts(name: str, seconds: float, what: str) -> None:
    result = run(Check(name, f"seeded_checks:{name}", seconds))
    [finding] = result.findings
    assert finding.what.startswith(what)
    assert finding.severity == "wrong"
    assert f"drivetrain doctor {name}" in finding.write
    assert result.facts == (["a fact before"] if name in ("raises", "hangs") else [])


@pytest.mark.usefixtures("seeded")
def test_ctrl_c_is_for_the_command_alone() -> None:
    assert run(Check("hears", "seeded_checks:hears", 60)).facts == ["Ctrl-C is blocked: True"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.usefixtures("seeded")
def test_ranks_share_a_folder_and_what_both_find_is_there_once() -> None:
    result = run(Check("shares", "seeded_checks:shares", 60, ranks=2))
    assert sorted(result.facts) == ["rank 0 of True", "rank 1 of True", "seen by both"]


# ---- the whole command, once -----------------------------------------------------------------------------------------

WRONG_SUM = """
import drivetrain.doctor.processes as processes

def check(rank, folder):
    processes.dist.all_reduce = lambda values: values.add_(1)
    yield from processes.check(rank, folder)
"""

PROGRAM = """
import json, sys
from dataclasses import asdict
from drivetrain.cli.command import main
from drivetrain.doctor.checks import Check, run

if __name__ == "__main__":
    code = main(["doctor", "--json"])
    print("torch" in sys.modules, code)
    wrong = run(Check("wrong", "wrong_sum:check", 60, uses_torch=True, ranks=2))
    print(json.dumps(asdict(wrong)))
"""


def test_the_whole_command_finds_what_torch_does_wrong_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "wrong_sum.py").write_text(WRONG_SUM, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, cwd=tmp_path)
    *shown, ended, control = done.stdout.splitlines()
    assert done.stderr == ""
    found = json.loads("\n".join(shown))
    assert found["schema"] == 1
    assert [each["name"] for each in found["checks"]] == [check.name for check in CHECKS]
    wrong = [each for result in found["checks"] for each in result["findings"] if each["severity"] == "wrong"]
    assert [each for each in wrong if "torch.optim.SGD" not in each["what"]] == []
    assert ended == f"False {int(bool(wrong))}"  # the command itself imports no torch
    facts = {each["name"]: "; ".join(each["facts"]) for each in found["checks"]}
    assert "cpu: 16-mixed, 16-true, 32-true, 64-true, bf16-mixed, bf16-true" in facts["devices"]
    assert "gloo: " in facts["processes"]
    assert "comparisons on cpu" in facts["optimizers"]
    # the control: a backend that adds something else
    assert json.loads(control)["findings"][0]["what"].startswith("Over gloo, a sum of two ranks is ")
