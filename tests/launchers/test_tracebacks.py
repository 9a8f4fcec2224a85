"""What Python prints when a job has failed: the user's lines, and the error that is explained last."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import tracebacks

PROGRAM = """
import sys
import torch
from drivetrain import Engine, LightningModule, Trainer
from drivetrain.errors import ConfigurationError

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        if sys.argv[2] == "rank 1":
            return lookup(batch) if self.trainer.global_rank == 1 else self.used(batch).sum() + self.unused(batch).sum()
        return self.used(batch).sum() if sys.argv[2] == "unused" else lookup(batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def lookup(batch):
    return {}["missing"]

if __name__ == "__main__":
    if sys.argv[2] == "engine":
        Engine(accelerator="cpu", devices=2, strategy=sys.argv[1]).launch()
        lookup(None)
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 2), 2))
"""
LIBRARY = str(Path(drivetrain.__file__).parent)
TORCH = str(Path(torch.__file__).parent)


@pytest.mark.parametrize(
    ("strategy", "mistake", "last"),
    [
        ("ddp", "unused", "drivetrain.errors.ConfigurationError: The loss of the last batch did not depend on"),
        ("ddp_spawn", "unused", "raised drivetrain.errors.ConfigurationError: The loss of the last batch did not"),
        ("ddp", "lookup", "KeyError: 'missing'"),
        ("ddp_spawn", "lookup", "raised KeyError: 'missing'"),
        ("ddp", "engine", "KeyError: 'missing'"),
    ],
)
def test_the_error_is_last_and_tracebacks_are_the_users(tmp_path: Path, strategy: str, mistake: str, last: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program, strategy, mistake], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0
    *_, place, end = [line for line in done.stdout.splitlines() if line.strip()]
    assert last in (place if "train.py" in end and end.startswith("at ") else end), done.stdout
    assert "trainer.fit(Net()" in done.stdout or mistake == "engine"
    assert LIBRARY not in done.stdout
    assert TORCH not in done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes, so the reason is a line of the log")
def test_a_rank_that_ends_because_another_one_failed_shows_no_lines_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program, "ddp", "rank 1"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0
    of_first = [line for line in done.stdout.splitlines() if line.startswith("[rank0]")]
    assert any("Rank 1 had failed" in line and "KeyError: 'missing'" in line for line in of_first), done.stdout
    assert not any("File " in line for line in of_first), done.stdout
    assert any("in lookup" in line for line in done.stdout.splitlines() if line.startswith("[rank1]")), done.stdout


class Printed:
    """In the place of what prints exceptions."""

    def __init__(self) -> None:
        self.functions: list[list[str]] = []

    def __call__(self, kind: Any, error: BaseException | None, trace: types.TracebackType | None) -> None:
        assert error is not None
        assert error.__traceback__ is trace
        while error is not None:
            names, trace = [], error.__traceback__
            while trace is not None:
                names.append(trace.tb_frame.f_code.co_name)
                trace = trace.tb_next
            self.functions.append(names)
            error = error.__cause__


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Printed:
    found = Printed()
    monkeypatch.setattr(sys, "excepthook", found)
    monkeypatch.setattr(tracebacks, "_before", [])
    tracebacks.cut_tracebacks()
    tracebacks.cut_tracebacks()  # which changes nothing
    return found


def in_library(code: str, **names: Any) -> Any:
    """Call a function that seems to be in a file of drivetrain."""
    exec(compile(f"def of_library():\n    {code}", f"{LIBRARY}/loops/anything.py", "exec"), names)
    return names["of_library"]()


def users(error: Exception | None = None) -> None:
    if error is not None:
        raise error
    in_library("return {}['missing']")


def raised(code: str, **names: Any) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011  whichever the code raises
        in_library(code, **names)
    return found.value


def test_frames_of_libraries_are_kept_below_the_users_lines_alone(printed: Printed) -> None:
    error = raised("users()", users=users)
    before = error.__traceback__
    sys.excepthook(type(error), error, before)
    assert printed.functions == [["raised", "in_library", "users", "in_library", "of_library"]]
    assert error.__traceback__ is before  # as a debugger wants it


def test_an_error_of_drivetrain_shows_lines_of_the_user_alone(printed: Printed) -> None:
    error = raised("users(error)", users=users, error=ConfigurationError("Write this."))
    sys.excepthook(type(error), error, error.__traceback__)
    assert printed.functions == [["raised", "in_library", "users"]]


def test_a_cause_is_cut_as_well(printed: Printed) -> None:
    error = raised("users(error)", users=users, error=ConfigurationError("Write this."))
    error.__cause__ = raised("users()", users=users)
    sys.excepthook(type(error), error, error.__traceback__)
    of_cause = ["raised", "in_library", "users", "in_library", "of_library"]
    assert printed.functions == [["raised", "in_library", "users"], of_cause]


def test_an_error_without_a_line_of_the_user_keeps_all(printed: Printed) -> None:
    error = raised("return {}['missing']")
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    sys.excepthook(type(error), error, error.__traceback__)
    assert printed.functions == [["of_library"]]
