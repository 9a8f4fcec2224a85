"""A program that a command runs against the same one under Python itself: all that it can see of its start and end."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from drivetrain.cli.program import add_program_arguments, command_of, program_parser, words_to_call

Run = Callable[..., "CompletedProcess[str]"]

PROBE = '''\
"""What a program sees."""
import atexit, json, os, pickle, sys
class Mine: pass
def at_exit():
    print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine)
atexit.register(at_exit)
spec = globals()["__spec__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "doc": __doc__, "package": __package__,
    "spec": spec and [spec.name, spec.origin], "loader": type(__loader__).__name__, "cached": __cached__,
    "builtins": repr(__builtins__), "main": vars(sys.modules["__main__"]) is globals(), "cwd": os.getcwd(),
    "names": sorted(set(globals()) - {"__annotations__"}),
}, indent=1))
'''


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run Python with these arguments in the test's folder."""

    def run(*arguments: str | Path) -> CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    return run


def run_both(python: Run, *arguments: str | Path, flags: tuple[str, ...] = ()) -> tuple[CompletedProcess[str], ...]:
    return python(*flags, *arguments), python(*flags, "-m", "drivetrain.compat", *arguments)


def alike(pair: tuple[CompletedProcess[str], ...]) -> str:
    """Assert that both runs printed and ended the same; return what they printed on stdout."""
    plain, ours = pair
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode
    return plain.stdout


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """The probe as a file, a module, a package, a folder, an archive and compiled."""
    for path in (
        "probe.py",
        "sub/probe.py",
        "pack/__init__.py",
        "pack/inner.py",
        "pack/__main__.py",
        "dir/__main__.py",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("" if path.endswith("__init__.py") else PROBE, encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    py_compile.compile(str(tmp_path / "probe.py"), cfile=str(tmp_path / "compiled.pyc"), doraise=True)
    return tmp_path / "probe.py"


@pytest.mark.parametrize(
    "arguments",
    [
        ("probe.py",),
        ("probe.py", "fit", "--numbers", "-m", "--", "-h"),
        ("sub/probe.py", "a"),
        (os.path.join("sub", "..", "probe.py"),),
        (os.path.join(".", "probe.py"),),
        ("compiled.pyc",),
        ("dir", "--lr=1"),
        ("archive.zip", "x"),
        ("-m", "probe", "--numbers", "3"),
        ("-m", "pack", "x"),
        ("-m", "pack.inner", "-m"),
    ],
    ids=" ".join,
)
def test_a_program_sees_what_python_itself_shows_it(python: Run, probe: Path, arguments: tuple[str, ...]) -> None:
    shown = alike(run_both(python, *arguments))
    assert '"name": "__main__"' in shown
    assert shown.endswith("True\n")  # pickled at exit, when __main__ must still be the program


def test_an_absolute_path(python: Run, probe: Path) -> None:
    alike(run_both(python, probe.parent / "sub" / "probe.py", "a"))


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_link_to_a_program_puts_the_folder_of_its_target_on_the_path(python: Run, probe: Path) -> None:
    (probe.parent / "elsewhere").mkdir()
    (probe.parent / "elsewhere" / "link.py").symlink_to(probe.parent / "sub" / "probe.py")
    assert str(probe.parent / "sub") in alike(run_both(python, "elsewhere/link.py"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is of Python 3.11")
def test_no_folder_is_put_on_the_path_where_python_was_told_so(python: Run, probe: Path) -> None:
    assert str(probe.parent / "sub") not in alike(run_both(python, "sub/probe.py", flags=("-P",))).split('"name"')[0]
    alike(run_both(python, "dir", flags=("-P",)))


ENDS = {
    "error": "def f():\n    raise ValueError('so')\n\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error\n",
    "code": "import sys\nsys.exit(3)\n",
    "text": "import sys\nsys.exit('no')\n",
    "syntax": "def f(:\n    pass\n",
    "encoding": "# coding: latin-1\nprint('\xe4'.encode('utf-8'))\n",
    "hook": "import sys\nsys.excepthook = lambda *e: print('mine', e[0], e[2].tb_frame.f_code.co_name)\n1 / 0\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "nothing": "",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_under_python_itself_with_its_traceback(python: Run, tmp_path: Path, end: str) -> None:
    (tmp_path / "program.py").write_bytes(ENDS[end].encode("latin-1"))
    alike(run_both(python, "program.py"))
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize("end", ["error", "code"])
def test_a_module_ends_as_under_python_itself(python: Run, tmp_path: Path, end: str) -> None:
    (tmp_path / "module.py").write_text(ENDS[end], encoding="utf-8")
    alike(run_both(python, "-m", "module"))


def test_a_missing_file_and_a_missing_module_are_answered(python: Run) -> None:
    _, ours = run_both(python, "trian.py")
    assert ours.returncode == 2
    assert ours.stderr == (
        "python -m drivetrain.compat: there is no file 'trian.py'. For a module, write -m before its name.\n"
    )
    plain, ours = run_both(python, "-m", "trian")
    assert ours.returncode == plain.returncode == 1
    assert "No module named trian" in ours.stderr


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["train.py", "--json", "--lr=1"], "advise: --json stands after train.py, so the program gets it"),
        (["train.py", "--kills=3", "-h"], "advise: --kills stands after train.py"),
        (["--json", "train.py", "--lr=1", "-m"], ""),
    ],
)
def test_an_option_that_stands_after_the_program_is_named(
    words: list[str], note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    parser = program_parser("advise", "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills")
    add_program_arguments(parser)
    given = parser.parse_args(words)
    assert command_of(given, parser) == words[words.index("train.py") :]  # the program gets it all the same
    said = capsys.readouterr().err
    assert note in said
    assert bool(said) == bool(note)


@pytest.mark.parametrize("hides", [True, False])
def test_a_process_of_a_command_imports_no_file_of_the_working_directory(tmp_path: Path, hides: bool) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    (tmp_path / "data.txt").write_text("[1]")
    words = ["-m", "json.tool"] if hides else words_to_call("json.tool", "assert sys.path[0]")
    done = subprocess.run([sys.executable, *words, "data.txt"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == ((3, []) if hides else (0, ["[", "1", "]"]))
