"""How this folder's tests are skipped where a package is missing, and fail where it is there and nothing ran."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def own() -> Any:
    """The conftest.py beside this file, as a module."""
    spec = importlib.util.spec_from_file_location("extras_conftest", HERE / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_package_is_said(own: Any) -> None:
    said, idle = own.verdict(Counter(), set())
    assert "SKIPPED: deepspeed is not installed, so none of its tests ran" in said
    assert idle == []


def test_an_installed_package_without_a_test_that_ran_is_a_failure(own: Any) -> None:
    assert own.verdict(Counter(), {"deepspeed"})[1] == ["FAILED: deepspeed is installed, and none of its tests ran"]
    assert own.verdict(Counter({"deepspeed": 1}), {"deepspeed"})[1] == []


def test_each_package_has_a_pin_and_tests(own: Any) -> None:
    pins = (HERE / "requirements.txt").read_text(encoding="utf-8")
    for package, start in own.PACKAGES.items():
        assert f"\n{package}==" in pins
        assert list(HERE.glob(f"{start}*.py"))
