"""Suites with packages of their own: skipped where one is missing; a failure where it is there and nothing ran."""

from __future__ import annotations

import importlib.util
import types
from collections import Counter
from pathlib import Path

import pytest
from tests.legacy_examples import running
from tests.legacy_examples.table import GENERATION, Row, rows
from tests.packages import Suite

HERE = Path(__file__).parent
SUITES = {
    "extras": ("requirements.txt", {"deepspeed": "test_deepspeed"}),
    "xla": ("requirements.txt", {"torch_xla": "test_"}),
}


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest) -> Suite:
    """The suite of a folder, as its conftest.py makes it."""
    return Suite(HERE / request.param, "DRIVETRAIN_NONE", "make test-none", SUITES[request.param][1])


def test_a_missing_package_is_said(suite: Suite) -> None:
    said, idle = suite.verdict(Counter(), set())
    assert said == [f"SKIPPED: {name} is not installed, so none of its tests ran" for name in suite.packages]
    assert idle == []


def test_an_installed_package_without_a_test_that_ran_is_a_failure(suite: Suite) -> None:
    for name in suite.packages:
        assert suite.verdict(Counter(), {name})[1] == [f"FAILED: {name} is installed, and none of its tests ran"]
        assert suite.verdict(Counter({name: 1}), {name})[1] == []


def test_without_its_target_a_suite_is_skipped(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in suite.packages:
        assert suite.missing(name) == "run by make test-none"
        monkeypatch.setenv("DRIVETRAIN_NONE", "1")
        assert suite.missing("no_such_package") == "no_such_package is not installed: see the output of make test-none"


def test_each_package_has_a_pin_and_tests(suite: Suite) -> None:
    pins = (suite.folder / "requirements.txt").read_text(encoding="utf-8")
    for package, start in suite.packages.items():
        assert f"\n{package}==" in pins
        assert list(suite.folder.glob(f"{start}*.py"))
        assert f'"{package}": "{start}"' in (suite.folder / "conftest.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "output", "found"),
    [
        (0, "2026-01-01 09:30:00 Epoch 1/1: 2/2 batches, 9 it/s\n", "trains"),
        (0, "2026-01-01 09:30:00 Epoch 1/1: 2/2 batches\n2026-01-01 09:30:09 Test: 3/3 batches\n", "trains and tests"),
        (0, "2026-01-01 09:30:00 Epoch 1/2: 2/2 batches\n", ""),  # it has not come to its end
        (0, "2026-01-01 09:30:00 Epoch 1/1: 2/2 batches\n2026-01-01 09:30:09 Test: 1/3 batches\n", "trains"),
        (1, "Traceback\nTypeError: too old\n", "needs more: `too old`"),
        (1, "too old\nTraceback\nTypeError: other\n", "too old\nTraceback\nTypeError: other\n"),
    ],
)
def test_what_an_official_example_has_done_is_read_from_its_output(
    code: int, output: str, found: str, tmp_path: Path
) -> None:
    class Programs:
        def run(self, *command: object, **options: object) -> object:
            return types.SimpleNamespace(returncode=code, stdout=output)

    row = Row("1.3.8", "one.py", [], "needs more: `too old`")
    data = tmp_path / "data"
    data.mkdir()
    assert running.result_of(row, "examples_1_3", data, Programs(), tmp_path) == found


def test_the_table_of_official_examples_can_be_read() -> None:
    for version in GENERATION:
        for row in rows(version):
            assert row.messages or row.does.startswith(("trains", "does nothing")), row
    assert rows("1.3.8")[1].options[0] == "--trainer.max_epochs=1"


def test_without_torch_xla_its_target_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("xla_install", HERE / "xla" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else name)
    assert not install.is_installed()
    assert capsys.readouterr().out.startswith("SKIPPED: torch_xla is not installed, so none of its tests ran.")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert install.is_installed()
    assert capsys.readouterr().out == ""
