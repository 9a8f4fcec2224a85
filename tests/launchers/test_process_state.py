"""What a process passes on: the parts whose real switches take seconds to set, or would stay set in this process."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from drivetrain.base.seed import isolate_rng
from drivetrain.launchers._process_state import ProcessState


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch was told about deterministic algorithms; it imports its compiler when it is."""
    told: list[Any] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: told.append((on, warn_only)))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return told


def test_t45_deterministic_algorithms_travel(chosen: list[Any]) -> None:
    state = replace(ProcessState.current(), deterministic=(True, True, False))
    with isolate_rng():
        state.apply({})
    assert chosen == [(True, True)]
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]


def test_what_is_as_it_should_be_is_not_touched(chosen: list[Any]) -> None:
    with isolate_rng():
        ProcessState.current().apply({})
    assert chosen == []


def test_ranks_win_over_what_was_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OTHER", "before")
    state = ProcessState.current()
    monkeypatch.setenv("OTHER", "after")
    with isolate_rng():
        state.apply({"RANK": "1"})
    assert (os.environ["RANK"], os.environ["OTHER"]) == ("1", "before")
