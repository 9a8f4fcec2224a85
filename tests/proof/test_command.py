"""``drivetrain prove-resume`` on programs that resume rightly and wrongly, with its exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from drivetrain.proof import runs
from drivetrain.proof.command import main
from drivetrain.proof.diff_command import main as diff
from drivetrain.proof.plugin import prove_resume
from drivetrain.proof.records import Writer, path_of

PROGRAM = """
import os
import sys
import torch

if "--fails" in sys.argv:
    raise RuntimeError("no such data")
torch.manual_seed(1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
done = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    if "--without-optimizer" not in sys.argv:
        optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
start = done
while done < 12:
    if "--random" in sys.argv:
        torch.seed()
    first = done + 0.5 * (start > 0 and "--wrong-batch" in sys.argv) + 0.25 * (done == 7 and "--other" in sys.argv)
    batch = torch.linspace(first, first + 1, 3)
    if "--random" in sys.argv:
        batch = torch.rand(3)
    optimizer.zero_grad()
    model(batch).square().sum().backward()
    optimizer.step()
    done += 1
    if done % 2 == 0 and "--never" not in sys.argv:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}, "new.pt")
        os.replace("new.pt", "last.pt")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program in the working directory."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return "train.py"


@pytest.mark.usefixtures("copies")
def test_a_program_that_resumes_exactly(program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--kills", "2", "--json", program]) == 0
    out, err = capsys.readouterr()
    assert "--kills" not in err
    assert "forks" not in err
    verdict = json.loads(out)
    line = verdict["message"]
    assert line.startswith("resumes exactly: 12 steps with 2 kills")
    for part in ("hash", "torch", "drivetrain", "python"):
        assert str(verdict[part]) in line
    assert [at >= after - 1 for at, after in verdict["kills"]] == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.usefixtures("copies")
def test_one_line_tells_that_a_program_has_fewer_steps_than_kills(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(program).write_text(PROGRAM.replace("done < 12", "done < 3"))
    assert main(["--kills", "100", program]) == 0
    out, err = capsys.readouterr()
    assert "--kills 100: of 3 steps, each after the first gets one kill, so there are 2\n" in err
    assert out.startswith("resumes exactly: 3 steps with 2 kills")


@pytest.mark.usefixtures("copies")
def test_one_line_tells_that_steps_of_a_forked_process_are_not_compared(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forks = "if os.fork() == 0:\n    while True: optimizer.step()\nwhile done < 3:"
    Path(program).write_text(PROGRAM.replace("while done < 12:", forks))
    assert main(["--kills", "1", program]) == 0
    out, err = capsys.readouterr()
    assert "the program makes optimizer steps in a process that it forks, too: these are not compared\n" in err
    assert out.startswith("resumes exactly: 3 steps with 1 kill")


@pytest.mark.usefixtures("copies")
def test_a_program_that_does_not_restore_its_optimizer(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "1", "--seed", "3", "--folder", "proof", program, "--without-optimizer"]) == 1
    head, first, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("does not resume exactly: killed in optimizer step")
    assert first == "  optimizer state: 0 tensors instead of 6, without 'step of weight'"
    assert sorted(path.name for path in Path("proof").iterdir()) == ["again", "killed", "program.json", "undisturbed"]


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(
    ("argument", "code", "text"),
    [
        ("--random", 2, "not deterministic: two undisturbed runs differ at step 1"),
        ("--never", 1, "at step 1 each time. If it resumes only when asked to, pass --resume-args; drivetrain's"),
    ],
)
def test_a_program_that_does_not_repeat_itself_or_never_resumes(
    program: str, argument: str, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--kills", "1", program, argument]) == code
    out = capsys.readouterr().out
    assert text in out
    assert "before the model is built" not in out  # its batches differ


@pytest.mark.usefixtures("copies")
def test_a_program_that_seeds_after_its_model_is_built_is_told_so(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(program).write_text(PROGRAM.replace("torch.manual_seed(1)", "torch.seed()"))
    assert main(["--kills", "1", program]) == 2
    assert "Seed what it draws, before the model is built" in capsys.readouterr().out


LINE = PROGRAM.splitlines().index("    batch = torch.linspace(first, first + 1, 3)") + 1
OPERATION = f"  first operation with another result: aten.linspace.default in train.py:{LINE}: batch = torch.linspace("


@pytest.mark.usefixtures("copies")
def test_why_names_the_operation_and_its_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "1", "--folder", "proof", "--why", program, "--wrong-batch"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  inputs of the model: ")
    assert lines[-1].startswith(OPERATION)


@pytest.mark.usefixtures("copies")
def test_diff_names_step_tensor_and_operation(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, words in (("one", []), ("same", []), ("other", ["--other"])):
        assert main(["--kills", "0", "--folder", folder, program, *words]) == 0
    assert capsys.readouterr().out.count("recorded: 12 steps") == 3
    assert diff(["one", "same"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("equal: 12 steps on 1 rank; hash ")
    assert "torch" not in out
    recorded = Path("same/program.json").read_text()
    Path("same/program.json").write_text(json.dumps({**json.loads(recorded), "torch": "0.1"}))
    assert diff(["one", "same"]) == 0
    assert f"note: recorded with torch {importlib.metadata.version('torch')} and torch 0.1" in capsys.readouterr().out
    assert diff(["one", "other", "--why"]) == 1
    head, inputs, _, gradients, *_, operation = capsys.readouterr().out.splitlines()
    assert head == "optimizer step 8 is the first that differs, in the second run:"
    assert inputs == "  inputs of the model: one that the undisturbed run never had"
    assert gradients == "  gradients: 'weight' and 1 more of 2"
    assert operation.startswith(OPERATION)

    assert diff(["one", "other", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["differences"][0]["step"], found["operation"]) == (False, 8, "")
    assert found["differences"][0]["part"] == "inputs of the model"

    def too_slow(*args: Any, **options: Any) -> None:
        raise runs.CannotTryError("The program did not end within 1 s.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.Run, "start", too_slow)
        assert diff(["one", "other", "--why"]) == 1
    assert capsys.readouterr().out.endswith("the step could not be repeated, so the operation is not known\n")


def test_diff_needs_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff([str(tmp_path / "one"), str(tmp_path / "other")]) == 2
    assert f"drivetrain prove-resume --kills 0 --folder {tmp_path / 'one'} PROGRAM" in capsys.readouterr().err


def test_diff_needs_a_rank_that_both_runs_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, name in enumerate(["one", "other"]):
        records = tmp_path / name / "undisturbed" / "records"
        records.mkdir(parents=True)
        path_of(records, 0, rank).touch()
    assert diff([str(tmp_path / "one"), str(tmp_path / "other")]) == 2
    text = f"{tmp_path}/one has rank 0 and {tmp_path}/other has rank 1. Record both with"
    assert f"the runs have no rank in common: {text}" in capsys.readouterr().err
    for words in ([], ["--ranks", "0", "1"], ["--ranks", "0", "0"]):
        assert diff([str(tmp_path / "one"), *words]) == 2
        assert f"{tmp_path}/one has records of rank 0. Name a second folder, or two ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        diff([str(tmp_path / "one"), str(tmp_path / "other"), "--ranks", "0", "1"])


def test_diff_of_a_run_that_was_interrupted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "undisturbed" / "records"
    records.mkdir(parents=True)
    path_of(records, 0, 0).touch()
    path_of(records, 0, 1).touch()
    assert diff([str(tmp_path)] * 2) == 2
    assert f"the run in {tmp_path} was interrupted. Record it again" in capsys.readouterr().err
    (tmp_path / "program.json").write_text("{}")
    for words in ([], [str(tmp_path)]):
        assert diff([str(tmp_path), *words]) == 2
        assert f"{tmp_path} has no recorded step of rank 0. Record the run again" in capsys.readouterr().err


def test_diff_of_ranks_that_hold_parts_of_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "undisturbed" / "records"
    records.mkdir(parents=True)
    for rank in range(2):
        Writer(path_of(records, 0, rank)).write("step", {"is_sharded": True, "time": 0.0}, {})
    assert diff([str(tmp_path)]) == 2
    assert "hold parts of the parameters, not copies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--kills", "-1", "train.py"], "--kills"),
        (["--ranks", "-1", "train.py"], "--ranks"),
        (["--resume-args", "--from", "--kills", "-1", "train.py"], "--kills must be"),  # one word that is an option
        (["--folder", ".", "train.py"], "exists"),
        (["python", "train.py"], "there is no file 'python'. Write the program's file without `python`"),
        (["--link", "no_data", "train.py"], "--link no_data must be a file or folder"),
        (["--link", "/tmp", "train.py"], "--link /tmp must be a file or folder, written relative to"),
        (["--resume-args", "--from {newest:/out/*}", "train.py"], "{newest:/out/*} must be relative"),
    ],
)
@pytest.mark.usefixtures("program")
def test_wrong_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("copies")
def test_diff_repeats_the_programs_as_they_were_recorded(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The program was changed between the records, its working directory is gone, and the first has written a file."""
    Path("project").mkdir()
    Path(program).rename("project/train.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("project")
        assert main(["--kills", "0", "--folder", "../before", program]) == 0
        Path(program).write_text(PROGRAM.replace("first = done +", "first = done + (done == 4) +"))
        assert main(["--kills", "0", "--folder", "../after", str(Path.cwd() / program)]) == 0
    shutil.rmtree("project")
    capsys.readouterr()
    assert diff(["before", "after", "--why"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(OPERATION)


@pytest.mark.usefixtures("copies")
def test_diff_starts_the_python_that_has_recorded_each_run_and_tells_which(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, words in (("one", []), ("other", ["--other"])):
        assert main(["--kills", "0", "--folder", folder, program, *words]) == 0
        assert json.loads(Path(folder, "program.json").read_text())["python"] == sys.executable
    other = Path("python").absolute()
    other.touch(0o700)
    for folder, python, ranks in (("one", other, 2), ("other", "no/python", 0)):
        found = json.loads(Path(folder, "program.json").read_text())
        changed = {"python": str(python), "torch": "0.1", "ranks": ranks}
        Path(folder, "program.json").write_text(json.dumps({**found, **changed}))
    started: list[str] = []
    monkeypatch.setattr(runs.Run, "start", lambda run, *args, **options: started.append(run.program.python))
    assert diff(["one", "other"]) == 1
    assert started == []
    capsys.readouterr()
    assert diff(["one", "other", "--why"]) == 1
    assert started == [str(other)]  # and as it records nothing, there is nothing to compare
    versions = importlib.metadata.version("torch")
    assert capsys.readouterr().err.splitlines() == [
        f"starting with torch 0.1: {other} -m torch.distributed.run --standalone --nproc-per-node=2 train.py",
        f"starting with torch {versions}: {sys.executable} train.py --other",  # recorded where there is no such Python
    ]


class Interrupted(subprocess.Popen[bytes]):
    """A program with a child in a session of its own, as torchrun has; the command gets a signal meanwhile."""

    number = signal.SIGINT
    children: ClassVar[list[psutil.Process]] = []

    def __init__(self, command: list[str], **options: Any) -> None:
        text = "import subprocess as s; p = s.Popen(['sleep', '600'], start_new_session=True); print(p.pid); p.wait()"
        super().__init__([sys.executable, "-uSc", text], **{**options, "stdout": subprocess.PIPE})

    def wait(self, timeout: float | None = None) -> int:
        if timeout:
            assert self.stdout is not None
            with self.stdout as lines:
                self.children.append(psutil.Process(int(lines.readline())))
            os.kill(os.getpid(), self.number)
        return super().wait(timeout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_command_leaves_no_process_and_no_folder(
    number: signal.Signals, program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(Interrupted, "number", number)
    monkeypatch.setattr(runs, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": Interrupted}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    Path("temporary").mkdir()
    assert main([program]) == 130
    assert capsys.readouterr().err == "drivetrain prove-resume: interrupted, the program was ended\n"
    _, alive = psutil.wait_procs(Interrupted.children, timeout=10)
    assert (len(alive), list(Path("temporary").iterdir())) == (0, [])
    Interrupted.children.clear()


@pytest.mark.usefixtures("copies")
def test_the_fixture_returns_the_verdict_or_fails_with_it(program: str, prove_resume: Any) -> None:
    assert prove_resume(program, kills=1).steps == 12


def test_a_program_that_fails_by_itself(program: str, prove_resume: Any) -> None:
    """In an interpreter of its own."""
    with pytest.raises(pytest.fail.Exception, match="fails by itself.*\n.*\n.*\n.*\n.*RuntimeError: no such data"):
        prove_resume(f"{program} --fails")


__all__ = ["prove_resume"]  # a fixture
