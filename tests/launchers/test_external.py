"""Somebody else has started the processes: the function is called, here."""

from __future__ import annotations

import pytest

from drivetrain.launchers import ExternalLauncher


def test_the_function_runs_here_and_its_result_is_the_same_object() -> None:
    given = object()
    assert ExternalLauncher().launch(lambda value, key: (value, key), given, key=1) == (given, 1)
    assert ExternalLauncher.is_external


def test_its_exceptions_are_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        ExternalLauncher().launch(lambda: 1 / 0)
