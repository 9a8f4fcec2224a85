"""What a program starts inherits drivetrain.compat: real processes of every kind."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drivetrain.compat import children

Answer = Callable[..., str]

PROGRAM = '''\
import json, os, subprocess, sys

def look(_=None):
    """What this process imports as Lightning, and with which switches."""
    import lightning.pytorch as pl
    from drivetrain import parity
    return [pl.__version__, type(pl).__name__, parity.current().undersized_windows, "torch" in sys.modules, os.getpid()]

class Looks:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return json.dumps(look())

def main(kind):
    if kind == "subprocess":
        code = "import json, program; print(json.dumps(program.look()))"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        return json.loads(done.stdout)
    if kind == "loader":
        from torch.utils.data import DataLoader
        loader = DataLoader(Looks(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
        [[text, _]] = loader  # to its end, at which its worker ends too, and not when the program does
        return json.loads(text)
    import multiprocessing
    with multiprocessing.get_context(kind).Pool(1) as pool:
        return pool.map(look, [0])[0]

if __name__ == "__main__":
    if "--install" in sys.argv:
        from drivetrain import compat
        compat.install("undersized_windows")
    print(json.dumps([os.getpid(), main(sys.argv[1])]))
'''

KINDS = ["subprocess", "spawn", "loader", *(["fork", "forkserver"] if os.name == "posix" else [])]


@pytest.fixture(autouse=True)
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def child_of(printed: str) -> list[Any]:
    parent, (*seen, child) = json.loads(printed)
    assert child != parent
    return list(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_of_an_executed_program_is_served_with_the_same_switches(answer: Answer, kind: str) -> None:
    printed = answer("-m", "drivetrain.compat", "--numbers", "undersized_windows", "program.py", kind)
    assert child_of(printed) == ["2.6.6", "ServedModule", True, kind == "loader"]


@pytest.mark.parametrize("kind", ["subprocess", "spawn"])
def test_a_child_of_a_program_that_installs_by_itself_is_served_too(answer: Answer, kind: str) -> None:
    assert child_of(answer("program.py", kind, "--install")) == ["2.6.6", "ServedModule", True, False]


def test_a_grandchild_is_served(answer: Answer) -> None:
    code = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, 'program.py', 'subprocess']).returncode)"
    (*seen, _) = json.loads(answer("-c", code, **inherited_environment()))[1]
    assert seen == ["2.6.6", "ServedModule", False, False]


def inherited_environment(**more: str) -> dict[str, str]:
    """What a child finds in its environment."""
    startup = Path(children.__file__).parent / "startup"
    return {"DRIVETRAIN_COMPAT": "none", "PYTHONPATH": os.pathsep.join([str(startup), *more.values()])}


@pytest.mark.skipif(find_spec("sitecustomize") is not None, reason="this Python has a sitecustomize of its own")
def test_a_python_that_inherits_nothing_has_no_lightning(answer: Answer) -> None:
    """The control: without the two variables the same program finds what is installed, or nothing."""
    code = "import program\ntry: print(program.look()[1])\nexcept ModuleNotFoundError as error: print(error.name)"
    assert answer("-c", code) in ("lightning", "module")


def test_starting_costs_a_child_a_few_modules_and_no_torch(answer: Answer) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    plain = set(answer("-c", code).split())
    new = set(answer("-c", code, **inherited_environment()).split()) - plain
    assert "drivetrain.compat" in new
    assert {name.split(".")[0] for name in new} <= {*sys.stdlib_module_names, "drivetrain", "sitecustomize"}
    assert not {"importlib.metadata", "importlib.resources", "tempfile", "argparse", "logging"} & new
    assert len([name for name in new if name.startswith("drivetrain")]) <= 11


def test_another_sitecustomize_runs_in_its_own_name(answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("print('theirs')\nVALUE = 3\n", encoding="utf-8")
    environ = inherited_environment(theirs=str(tmp_path / "theirs"))
    code = "import sitecustomize, lightning; print(sitecustomize.VALUE, lightning.__version__)"
    assert answer("-c", code, **environ).split() == ["theirs", "3", "2.6.6"]


def test_the_startup_files_of_two_installations_run_once_each(answer: Answer, tmp_path: Path) -> None:
    copy = tmp_path / "second"
    shutil.copytree(Path(children.__file__).parent / "startup", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n", encoding="utf-8")
    environ = inherited_environment(second=str(copy), theirs=str(tmp_path))
    assert answer("-c", "import lightning; print(lightning.__version__)", **environ).split() == ["theirs", "2.6.6"]


def test_a_python_without_drivetrain_starts_as_ever(answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n", encoding="utf-8")
    startup = str(Path(children.__file__).parent / "startup")
    code = f"import sys; sys.path.insert(0, {startup!r}); import sitecustomize; print('drivetrain' in sys.modules)"
    # -S: no site-packages, where drivetrain is, and no sitecustomize until it is imported here
    assert answer("-S", "-c", code, DRIVETRAIN_COMPAT="none").split() == ["theirs", "False"]


def test_the_environment_is_as_before_when_it_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "first" + os.pathsep + "second")
    monkeypatch.delenv(children.VARIABLE, raising=False)
    children.inherit([])
    children.inherit(["undersized_windows", "padded_evaluation"])
    assert children.inherited() == (["undersized_windows", "padded_evaluation"], "")
    assert os.environ["PYTHONPATH"].split(os.pathsep)[1:] == ["first", "second"]
    children.forget()
    assert os.environ["PYTHONPATH"] == "first" + os.pathsep + "second"
    assert children.VARIABLE not in os.environ


def test_no_pythonpath_is_left_where_there_was_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    children.inherit([])
    assert children.inherited() == ([], "")
    children.forget()
    assert "PYTHONPATH" not in os.environ
