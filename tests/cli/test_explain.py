"""``drivetrain explain``: each code has one meaning, a message that carries it, and an example that leads to it."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain.cli import explain
from drivetrain.cli.explain import Entry, entries, main

PACKAGE, ROOT = Path(drivetrain.__file__).parent, Path(__file__).parent.parent.parent
ENTRIES = list(entries())
SEVERAL_PROCESSES = {"DT1040", "DT1055", "DT1056", "DT1057", "DT1058", "DT1059", "DT1061"}
OF_A_MACHINE = {"DT1044", "DT1046", "DT1052", "DT1053"}  # of one with a device, or of a notebook
"""Codes whose messages one process on the host cannot show."""


def codes_in(source: str) -> set[str]:
    """The codes at the end of, or in, the texts of a file."""
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {code for text in texts if isinstance(text, str) for code in re.findall(r"\[(DT\d{4})\]", text)}


def used() -> set[str]:
    sources = (path for path in PACKAGE.rglob("*.py") if path.stem != "explain")
    return set().union(*(codes_in(path.read_text(encoding="utf-8")) for path in sources))


def test_each_message_has_an_entry_and_each_entry_a_message() -> None:
    current = {entry.code for entry in ENTRIES if not entry.title.startswith("Retired: ")}
    assert used() - {"DT1042"} == current - {"DT1042"}  # which the command's help names, too
    assert "[DT1042]" in (PACKAGE / "strategies" / "ddp.py").read_text(encoding="utf-8")
    assert codes_in('f"{value} is wrong. Write {cure}. [DT9999]"') == {"DT9999"}  # the control


def test_no_code_is_there_twice_and_each_entry_has_a_cause_and_a_cure() -> None:
    codes = [entry.code for entry in ENTRIES]
    assert codes == sorted(set(codes))
    assert [entry.code for entry in ENTRIES if not re.match("Cause: [^ ]", entry.body)] == []
    assert [entry.code for entry in ENTRIES if "\nCure: " not in entry.body] == []
    without = {entry.code for entry in ENTRIES if not entry.example}
    assert without == SEVERAL_PROCESSES | OF_A_MACHINE


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_errors() -> Any:
    spec = importlib.util.spec_from_file_location("make_errors", ROOT / "docs" / "make_errors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_messages_is_up_to_date(make_errors: Any) -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == make_errors.page(), "run python docs/make_errors.py"
    assert make_errors.recorded(page) == {entry.code: entry.title for entry in ENTRIES}


def test_a_code_never_gets_another_meaning(make_errors: Any) -> None:
    old = "### DT1001 A loss\n### DT1002 A name\n"
    make_errors.check_kept(old, "### DT1001 A loss\n### DT1002 Retired: A name\n### DT1003 New\n")
    for new in ("### DT1001 A loss\n", "### DT1001 A loss\n### DT1002 Something else\n"):
        with pytest.raises(SystemExit, match="DT1002 is 'A name' on the page"):
            make_errors.check_kept(old, new)


def test_a_new_message_gets_the_next_free_code(
    make_errors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, source = tmp_path / "messages.md", tmp_path / "source.py"
    registry.write_text("## DT1007 Old\nCause: x.\n\n## DT0000 New\nCause: y.\n", encoding="utf-8")
    source.write_text('raise E("Write z. [DT0000]")\n', encoding="utf-8")
    monkeypatch.setattr(explain, "FILE", registry)
    monkeypatch.setattr(make_errors, "FILE", registry)
    make_errors.number_new([source])
    assert [(entry.code, entry.title) for entry in entries()] == [("DT1007", "Old"), ("DT1008", "New")]
    assert source.read_text(encoding="utf-8") == 'raise E("Write z. [DT1008]")\n'


# ---- the examples ----------------------------------------------------------------------------------------------------


@pytest.fixture
def environ() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def outcome(path: Path) -> str:
    """What a program raises, warns of and prints."""
    output, end = io.StringIO(), ""
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(output):
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(output):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except Exception as error:
                end = "".join(traceback.format_exception_only(error))
    return "\n".join([end, output.getvalue(), *(str(each.message) for each in warned)])


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.example], ids=lambda entry: entry.code)
def test_the_example_leads_to_the_message(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "example.py"
    path.write_text(explain.PRELUDE + entry.example + "\n", encoding="utf-8")
    said = outcome(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # an example may leave a socket or a file open
        gc.collect()
    assert f"[{entry.code}]" in said


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["DT1042", "dt1042", "1042", "[DT1042]"])
def test_a_code_is_explained_however_it_is_copied(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("DT1042: DDP waits for the gradient")
    assert [part in shown for part in ("\nCause: ", "\nCure: ", "class Unused(Net):", "class Net(")] == [True] * 4


def test_without_an_example_there_are_no_lines_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["DT1055"]) == 0
    assert "begins with" not in capsys.readouterr().out


def test_without_a_code_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{entry.code}  {entry.title}" for entry in ENTRIES]


@pytest.mark.parametrize(("word", "said"), [("DT1402", "Did you mean DT1042?"), ("", "there is no code ''")])
def test_an_unknown_code_is_answered(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_imports_no_torch() -> None:
    code = 'import sys; from drivetrain.cli.command import main; print(main(["explain"]), "torch" in sys.modules)'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
