from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.accelerators import Accelerator, AcceleratorRegistry
from drivetrain.base.registry import Registry


@pytest.fixture
def xpulib(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The vendor's library that stands beside this file."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("xpulib")


@pytest.fixture
def registry() -> Iterator[Registry[Accelerator]]:
    """The accelerators, and afterwards without what the test has added."""
    before = dict(AcceleratorRegistry._registered)
    yield AcceleratorRegistry
    AcceleratorRegistry._registered.clear()
    AcceleratorRegistry._registered.update(before)
