from __future__ import annotations

import sys
from importlib import metadata

import pytest
import torch

from drivetrain.compat import versions


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13, 0)), ("2.9.1.dev3", (2, 9, 1)), ("2.10.0a0", (2, 10, 0)), ("2.6.6rc1", (2, 6, 6)),
        ("3", (3,)),
    ],
)  # fmt: skip
def test_a_version_is_read_as_numbers(text: str, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: text)
    assert versions._version("anything") == numbers


def test_the_flags_say_what_is_installed() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert ((major, minor) >= (2, 6)) is versions._TORCH_GREATER_EQUAL_2_6
    assert versions._version("no-such-distribution") == ()
    assert (sys.version_info >= (3, 11)) is versions._PYTHON_GREATER_EQUAL_3_11_0
    assert versions._NUMPY_AVAILABLE
