from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAME = "tests.distributed.pool"  # as pytest would name it; under one name, every folder shares one pool


def pool_module() -> ModuleType:
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name("pool.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[NAME]


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Processes for tests of several ranks: ``pool.run(function, *args, world_size=2)``."""
    shared = pool_module().shared()
    yield shared
    shared.close()
