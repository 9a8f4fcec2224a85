"""docs/traps.md against the tests: ids in test names resolve there, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
SUITES = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src" / "drivetrain" / "testing").glob("*.py")]
IN_A_NAME = re.compile(r"(?<![a-z0-9])(t\d{1,2}|c\d{1,2}|[se]\d_\d{1,2}|(?<=test_)3_\d{1,2})(?=_)")
IN_TEXT = re.compile(r"\b(T\d{1,2}|[SE]\d-\d{1,2})\b")


def entries(page: str) -> dict[str, str]:
    """The text of each row of the page's tables by its id."""
    return {found[1]: found[2] for found in re.finditer(r"^\| ([A-Z0-9]+(?:-\d+)?) \|(.*)\|$", page, re.M)}


def named_tests(text: str) -> list[str]:
    """The tests that a text names, as ``path::function``."""
    return re.findall(r"`([\w/]+\.py::\w+)`", text)


def missing_tests(tests: Iterable[str]) -> list[str]:
    """Which of ``tests`` do not exist; nothing is imported to find out."""
    defined: dict[str, set[str]] = {}
    for path in {test.partition("::")[0] for test in tests}:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8")) if (ROOT / path).is_file() else ast.Module([], [])
        defined[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return sorted(test for test in tests if test.partition("::")[2] not in defined[test.partition("::")[0]])


def cited_ids(text: str) -> set[str]:
    """The ids in a test file: in the names of its tests, and in its comments and docstrings."""
    names = " ".join(re.findall(r"def (test_\w+)", text))
    return {found.upper().replace("_", "-") for found in IN_A_NAME.findall(names)} | set(IN_TEXT.findall(text))


def test_each_id_that_a_test_cites_has_an_entry() -> None:
    cited = {name: path.name for path in SUITES for name in cited_ids(path.read_text(encoding="utf-8"))}
    assert {name: file for name, file in cited.items() if name not in entries(PAGE)} == {}


def test_each_test_that_the_page_names_exists() -> None:
    assert missing_tests(named_tests(PAGE)) == []


@pytest.mark.parametrize("number", range(1, 59))
def test_each_trap_has_one_entry_and_a_test_or_says_what_is_missing(number: int) -> None:
    assert len(re.findall(rf"^\| T{number} \|", PAGE, re.M)) == 1
    text = entries(PAGE)[f"T{number}"]
    assert named_tests(text) or "Not covered yet: " in text


def test_each_other_id_has_a_test_that_bears_it() -> None:
    for name, text in entries(PAGE).items():
        if not name.startswith("T"):
            assert any(name in cited_ids(f"def {test.partition('::')[2]}") for test in named_tests(text)), name


def test_what_is_missing_is_found() -> None:
    """The control: ids are found in names and in text, and a test that is not there is reported."""
    assert cited_ids('def test_t3_s0_12_and_so_on(): """Not T18."""') == {"T3", "S0-12", "T18"}
    assert cited_ids("def test_3_10_limits(): pass\ndef test_in_16_bits(): pass") == {"3-10"}
    here = Path(__file__).relative_to(ROOT).as_posix()
    assert missing_tests([f"{here}::test_gone", f"{here}::test_what_is_missing_is_found", "tests/gone.py::test_x"]) == [
        "tests/gone.py::test_x", f"{here}::test_gone",
    ]  # fmt: skip
    assert entries("| id | trap |\n|---|---|\n| T1 | a | `b` |\n\n| C1 | c |\n") == {"T1": " a | `b` ", "C1": " c "}
