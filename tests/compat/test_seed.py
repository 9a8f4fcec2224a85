from __future__ import annotations

import logging
import random

import pytest
import torch

from drivetrain.compat.seed import isolate_rng, pl_worker_init_function, reset_seed, seed_everything


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def draw() -> tuple[float, float]:
    return random.random(), float(torch.rand(()))


def test_verbose_is_an_argument(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="drivetrain"):
        assert seed_everything(7) == 7
        assert seed_everything(8, workers=True, verbose=False) == 8
    assert caplog.messages == ["Seed set to 7"]


def test_reset_goes_back_to_the_last_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(7, verbose=False)
    first = draw()
    assert draw() != first
    reset_seed()
    assert draw() == first
    monkeypatch.delenv("PL_GLOBAL_SEED")
    reset_seed()
    assert draw() != first


def test_isolated_draws_leave_no_trace() -> None:
    seed_everything(7, verbose=False)
    with isolate_rng(include_cuda=False):
        first = draw()
    assert draw() == first


def test_t47_workers_are_seeded_apart() -> None:
    with isolate_rng():
        torch.manual_seed(5)
        pl_worker_init_function(0, rank=0)
        first = random.random()
        pl_worker_init_function(1)
        assert random.random() != first
