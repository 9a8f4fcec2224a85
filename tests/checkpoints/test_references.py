"""Classes and functions by name: nothing is imported, no attribute is computed, and what runs programs stays closed."""

from __future__ import annotations

import collections
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.checkpoints.references import find, find_open, name_of


class Outer:
    class Inner:
        pass

    def method(self) -> None: ...

    @property
    def computed(self) -> Any:
        raise AssertionError("looked at")


def function() -> None: ...


alias = function
imported = math.sin


@pytest.mark.parametrize("obj", [Outer, Outer.Inner, function, math.sin, collections.deque, torch.nn.ReLU])
def test_a_name_leads_back(obj: Any) -> None:
    name = name_of(obj)
    assert name is not None
    assert find(name) is obj
    assert find_open(name) is obj


def test_names_are_written_with_a_colon() -> None:
    assert name_of(Outer.Inner) == f"{__name__}:Outer.Inner"


@pytest.mark.parametrize("obj", [lambda: 1, Outer().method, Outer.method, type("Outer", (), {}), 3, math, torch.relu])
def test_what_has_no_name_of_its_own(obj: Any) -> None:
    assert name_of(obj) is None


@pytest.mark.parametrize(
    "tail",
    ["imported", "alias", "Outer.method", "Outer.computed", "Outer.missing", "missing", "Outer.__init__", "",
     "Outer.", ".", "__name__", "Outer.Inner.Outer", "__builtins__", "sys", "subprocess.Popen", "Outer.__class__"],
)  # fmt: skip
def test_only_where_it_was_defined(tail: str) -> None:
    assert find(f"{__name__}:{tail}") is None


@pytest.mark.parametrize("name", ["", ":", "x", "no.such.module:x", f"{__name__}", "os.path:join.x"])
def test_names_that_are_none(name: str) -> None:
    assert find(name) is None


def test_a_lazy_module_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    lazy = Lazy("a_lazy_module")
    monkeypatch.setitem(sys.modules, "a_lazy_module", lazy)
    assert find("a_lazy_module:Anything") is None
    monkeypatch.setitem(sys.modules, "no_module", object())  # type: ignore[arg-type]
    assert find("no_module:Anything") is None


@pytest.mark.parametrize("obj", [subprocess.Popen, subprocess.run, eval, open, torch.load, np.load, np.memmap, type])
def test_what_could_run_a_program_or_write_a_file_is_closed(obj: Any) -> None:
    name = name_of(obj)
    assert name is None or find_open(name) is None


@pytest.mark.parametrize("obj", [int, dict, range, Path, np.float32, torch.Tensor, torch.optim.SGD, Outer, function])
def test_what_hyperparameters_are_made_of_is_open(obj: Any) -> None:
    name = name_of(obj)
    assert name is not None
    assert find_open(name) is obj
