from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAME = "tests.distributed.pool"


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """The same processes as tests/distributed/conftest.py gives."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, Path(__file__).parents[1] / "distributed" / "pool.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    shared = sys.modules[NAME].shared()
    yield shared
    shared.close()
