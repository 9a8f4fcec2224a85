"""Seeding: which seed, what it reaches, and how a block is kept from disturbing it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain.base import seed
from drivetrain.base.seed import (
    Generators,
    isolate_rng,
    kept_rng_state,
    rng_state,
    seed_everything,
    set_rng_state,
    worker_seed_init,
)
from drivetrain.errors import CheckpointError, ConfigurationError


@pytest.fixture(autouse=True)
def leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # so that the environment before the test is put back after it
        monkeypatch.delenv(name)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_one_seed_reaches_all_three_generators() -> None:
    assert seed_everything(3) == 3
    first = draws()
    between = draws()
    seed_everything(3)
    assert draws() == first
    assert all(a != b for a, b in zip(between, first, strict=True))
    seed_everything(4)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_without_numpy_the_others_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    seed_everything(3)
    first = random.random(), float(torch.rand(()))
    seed_everything(3)
    assert (random.random(), float(torch.rand(()))) == first
    assert "numpy" not in rng_state()


@pytest.mark.parametrize(
    ("environ", "seed", "expected"),
    [(None, None, 0), ("17", None, 17), ("17", 5, 5), ("no number", 5, 5), (None, 2**32 - 1, 2**32 - 1), (None, 0, 0)],
)
def test_which_seed(environ: str | None, seed: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if environ is not None:
        monkeypatch.setenv("PL_GLOBAL_SEED", environ)
    assert seed_everything(seed) == expected
    assert os.environ["PL_GLOBAL_SEED"] == str(expected)  # what processes started from here inherit
    assert torch.initial_seed() == expected


@pytest.mark.parametrize(("workers", "exported"), [(False, "0"), (True, "1")])
def test_the_wish_for_seeded_workers_is_exported(workers: bool, exported: str) -> None:
    seed_everything(1, workers=workers)
    assert os.environ["PL_SEED_WORKERS"] == exported


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    before = random.getstate()
    with pytest.raises(ConfigurationError, match=rf"0\.\.4294967295, not {seed}"):
        seed_everything(seed)
    assert random.getstate() == before


@pytest.mark.parametrize("seed", [1.5, "7"])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="not"):
        seed_everything(seed)
    assert "PL_GLOBAL_SEED" not in os.environ


@pytest.mark.parametrize("text", ["abc", "1.5", "-1", ""])
def test_a_bad_environment_variable_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", text)
    with pytest.raises(ConfigurationError, match=f"PL_GLOBAL_SEED .* not '{text}'"):
        seed_everything()


def test_isolate_rng_restores_every_generator() -> None:
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with isolate_rng():
        seed_everything(99)
        draws()
    assert draws() == expected


def test_isolate_rng_restores_after_an_exception() -> None:
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    with pytest.raises(KeyError), isolate_rng():
        {}[draws()]
    assert draws() == expected


def test_without_isolation_the_block_does_disturb() -> None:  # the control of the two above
    seed_everything(1)
    expected = draws()
    seed_everything(1)
    draws()
    assert draws() != expected


def test_a_state_survives_as_plain_data(tmp_path: Any) -> None:
    seed_everything(5)
    draws()
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = draws()
    draws()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draws() == expected


def worker_draws(worker: int, base: int, rank: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, ...]:
    """What python, numpy and torch draw in a worker, as a DataLoader starts it."""
    monkeypatch.setenv("RANK", rank)
    torch.manual_seed(base + worker)  # a DataLoader does this before it calls worker_init_fn
    worker_seed_init(worker)
    return random.random(), float(np.random.rand()), float(torch.rand(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 3}, r"\['ranks'\] is 3"),
        ({}, r"\['ranks'\] is missing"),
        (
            {"ranks": [{**rng_state(), "torch": torch.ones(3)}]},
            r"\['ranks'\]\[0\]\['torch'\] is not the state of a gen",
        ),
        ({"ranks": []}, "saved by 0 processes, and there are 1"),
    ],
)
def test_a_checkpoints_state_is_checked_before_any_generator_moves(change: Any, message: str) -> None:
    before = random.getstate()
    with pytest.raises(CheckpointError, match=message):
        Generators().load_state_dict(change)
    assert random.getstate() == before


def test_t47_workers_ranks_and_seeds_all_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(worker, base, rank) for worker in range(4) for base in (0, 1, 2**40) for rank in ("0", "1", "2")]
    drawn = [worker_draws(*case, monkeypatch) for case in cases]
    python, numpy, by_torch = (set(draws) for draws in zip(*drawn, strict=True))
    assert len(python) == len(numpy) == len(cases)
    # on rank 0 as torch has it, which adds the worker to the base and takes 32 bits of the sum: five seeds from 0 to 4
    assert len(by_torch) == 24 + 5


def test_t47_the_same_worker_draws_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = worker_draws(2, 11, "1", monkeypatch)
    worker_draws(3, 12, "0", monkeypatch)
    assert worker_draws(2, 11, "1", monkeypatch) == first


def test_t47_torch_is_left_to_the_loader_on_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    worker_seed_init(0)
    assert torch.equal(torch.rand(3), expected)


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float]:
        return random.random(), float(np.random.rand())


def test_t47_in_real_workers() -> None:
    def epoch(seed: int) -> list[list[float]]:
        seed_everything(seed)
        loader = DataLoader(Draws(), batch_size=2, num_workers=2, worker_init_fn=worker_seed_init)
        return [[float(value) for value in batch[0]] for batch in loader]

    first = epoch(1)
    assert epoch(1) == first
    assert len({value for batch in (*first, *epoch(2)) for value in batch}) == 8


def test_a_kept_state_is_the_present_one_whatever_was_drawn() -> None:
    draws: list[Any] = [
        lambda: None, np.random.rand, np.random.randn, lambda: np.random.randn(3), lambda: np.random.seed(1),
        random.random, lambda: random.gauss(0, 1), lambda: torch.rand(1),
        lambda: np.random.set_state(np.random.RandomState(2).get_state()), lambda: random.seed(4),
        lambda: random.setstate(random.Random(5).getstate()), lambda: [random.random() for _ in range(312)],
    ]  # fmt: skip
    choices = random.Random(0)
    with isolate_rng():
        for _ in range(300):
            choices.choice(draws)()
            kept, now = kept_rng_state(), rng_state()
            np.random.rand(), np.random.randn(), random.random()  # what is kept does not follow
            found = kept()
            assert found["numpy"] == now["numpy"]
            assert found["python"] == now["python"]
            assert torch.equal(found["torch"], now["torch"])


def test_python_is_not_asked_for_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_rng_state()  # the first call compares them once
    with isolate_rng():
        expected = random.getstate()
        monkeypatch.setattr(random, "getstate", None)
        assert kept_rng_state()()["python"] == expected


class Elsewhere(random.Random):
    """A generator whose memory need not lie where that of ``random.Random`` does."""


def test_python_is_asked_where_its_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(random, "_inst", Elsewhere(7))
        patch.setattr(random, "getstate", lambda: "asked")
        seed._python_twister.cache_clear()
        assert kept_rng_state()()["python"] == "asked"
    seed._python_twister.cache_clear()
    assert kept_rng_state()()["python"] == random.getstate()


@pytest.mark.parametrize(("draw", "asked"), [(lambda: None, 1), (np.random.rand, 50)])
def test_numpy_is_asked_again_only_when_something_was_drawn(
    draw: Any, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with isolate_rng():
        seed_everything(3)
        calls: list[None] = []
        ask = np.random.get_state
        monkeypatch.setattr(np.random, "get_state", lambda: calls.append(None) or ask())
        for _ in range(50):
            draw()
            kept_rng_state()
        assert len(calls) == asked


@pytest.mark.parametrize("verbose", [True, False])
def test_the_seed_is_logged_if_it_is_asked_for(verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert seed_everything(7, verbose=verbose) == 7
    assert caplog.messages == ["Seed set to 7."] * verbose
