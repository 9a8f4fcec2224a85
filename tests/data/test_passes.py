"""Passes over a loader that are taken up in their middle; whole runs are in tests/test_resume.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.base.seed import rng_state, set_rng_state
from drivetrain.data import CombinedLoader
from drivetrain.data.kept import generators_kept
from drivetrain.data.loader_passes import random_state
from drivetrain.data.passes import is_replayed, passes_over
from drivetrain.errors import CheckpointError
from drivetrain.loops.restart_checks import check_position


class Noisy(Dataset[Any]):
    """Draws from every generator where a sample is fetched."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(7))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("own_generator", [False, True])
def test_t26_workers_are_taken_up_with_their_random_state(workers: int, own_generator: bool) -> None:
    def loader() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(8) if own_generator else None
        return DataLoader(Noisy(), 2, shuffle=True, num_workers=workers, generator=generator)

    torch.manual_seed(5)
    whole = passes_over(loader())
    positions, batches = [], []
    for batch in whole:
        batches.append(batch)
        positions.append(whole.position())
    assert len(batches) == 7
    for done, position in enumerate(positions, 1):
        torch.manual_seed(done)
        random.seed(done)
        numpy.random.seed(done)
        again = passes_over(loader())
        again.resume(position)
        rest = list(again)
        assert len(rest) == 7 - done
        assert all(torch.equal(a, b) for a, b in zip(rest, batches[done:], strict=True)), done


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("taken", [1, 3, 6])
def test_t26_workers_that_persist_after_a_pass_that_was_left_early(workers: int, taken: int) -> None:
    """They have fetched ahead by then; a plain loader's batches are the same."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Noisy(), 2, shuffle=True, num_workers=workers, persistent_workers=True)

    def leave(passes: Any) -> None:
        for number, _ in enumerate(passes, 1):
            if number == taken:
                break

    torch.manual_seed(5)
    plain = loader()
    leave(plain)
    expected = list(plain)

    torch.manual_seed(5)
    whole = passes_over(loader())
    leave(whole)
    positions, states, batches = [whole.position()], [rng_state()], []
    whole.start_epoch()
    for batch in whole:
        batches.append(batch)
        positions.append(whole.position())
        states.append(rng_state())
    assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=True))
    for done in (0, 1, 2, 5):
        torch.manual_seed(done)
        random.seed(done)
        again = passes_over(loader())
        if done:
            again.resume(positions[done])
        else:
            again.carry_over(positions[0])
        set_rng_state(states[done])
        assert all(torch.equal(a, b) for a, b in zip(again, batches[done:], strict=True)), done
        assert torch.equal(torch.get_rng_state(), states[-1]["torch"])


def test_what_a_pass_draws_is_what_its_loader_draws() -> None:
    loader = DataLoader(Noisy(), 2, shuffle=True)
    seen = []
    for source in (loader, passes_over(loader)):
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        seen.append(torch.cat(list(source)))
    assert torch.equal(*seen)


def test_only_what_knows_no_place_is_fetched_again() -> None:
    drawn = DataLoader(Noisy(), 2)
    assert not is_replayed(drawn)
    assert is_replayed(DataLoader(Stream()))
    assert is_replayed([1, 2])
    assert not is_replayed(CombinedLoader([drawn, drawn]))
    assert is_replayed(CombinedLoader([drawn, DataLoader(Stream())]))


def test_a_loader_that_has_become_shorter_is_said() -> None:
    whole = passes_over(DataLoader(Stream(), batch_size=1))
    batches = iter(whole)
    for _ in range(5):
        next(batches)
    with pytest.raises(CheckpointError, match="after 5 batches of an epoch, and the loader list gave only 2"):
        passes_over([1, 2]).resume(whole.position())


class Counted:
    """A loader with a state, which begins a new pass with each iteration but for the first after a state was loaded."""

    def __init__(self) -> None:
        self.state, self.continues = {"given": 0, "begun": 0}, False

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state, self.continues = dict(state), state["begun"] > 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        if not self.continues:
            self.state = {"given": 0, "begun": self.state["begun"] + 1}
        self.continues = False
        return self.rest()

    def rest(self) -> Iterator[int]:
        while self.state["given"] < 4:
            self.state["given"] += 1
            yield 10 * self.state["begun"] + self.state["given"]


@pytest.mark.parametrize("limit", [2, 4, float("inf")])
def test_a_position_between_two_passes_outlives_several_restarts(limit: float) -> None:
    position: Any = None
    for _ in range(3):
        passes = passes_over(Counted())
        passes.limit = limit
        if position is None:
            list(passes)
        else:
            passes.carry_over(position)
        position = passes.position()
        check_position(position, passes)
    assert list(passes) == [21, 22, 23, 24][: int(min(limit, 4))]


def test_generators_of_the_users_own_are_put_back() -> None:
    generator = torch.Generator().manual_seed(2)
    state = generator.get_state()
    with generators_kept([DataLoader(Noisy(), generator=generator, shuffle=True)]):
        torch.rand(3, generator=generator)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("limits", [None, [2, 6]])
def test_t38_combined_passes_are_taken_up_anywhere(mode: str, workers: int, limits: Any) -> None:
    def loader() -> CombinedLoader:
        parts = [DataLoader(list(range(n)), 1, shuffle=True, num_workers=workers) for n in (3, 7)]  # type: ignore[arg-type]
        combined = CombinedLoader(parts, mode)
        combined.limits = limits
        return combined

    def plain(batch: Any) -> list[Any]:
        return [None if part is None else int(part) for part in batch]

    torch.manual_seed(3)
    whole = passes_over(loader())
    batches, positions = [], []
    for batch in whole:
        batches.append(plain(batch))
        positions.append((whole.position(), torch.get_rng_state()))
    assert len(batches) == (7 if limits is None else 6)
    for done, (position, state) in enumerate(positions, 1):
        torch.manual_seed(99)
        again = passes_over(loader())
        again.resume(position)
        torch.set_rng_state(state)
        saved_again = again.position()  # by a run that ends before its next batch
        check_position(saved_again, again)
        assert [plain(batch) for batch in again] == batches[done:], done
        torch.manual_seed(98)
        again = passes_over(loader())
        again.resume(saved_again)
        torch.set_rng_state(state)
        assert [plain(batch) for batch in again] == batches[done:], done


def test_limits_of_a_combined_loader_may_change_between_passes() -> None:
    combined = CombinedLoader([DataLoader([1, 2, 3]), DataLoader([4, 5, 6])], "min_size")  # type: ignore[arg-type]
    passes = passes_over(combined)
    assert len(list(passes)) == 3
    combined.limits = 2
    passes.start_epoch()
    assert len(list(passes)) == len(passes) == 2


class Forgetful:
    """A loader that keeps the state that it has loaded, and loses it if it is asked for its state before a batch."""

    def __init__(self) -> None:
        self.state: dict[str, int] = {"done": 0}

    def __iter__(self) -> Any:
        for number in range(self.state["done"], 5):
            self.state["done"] = number + 1
            yield number
        self.state = {"done": 0}

    def state_dict(self) -> dict[str, int]:
        done = {**self.state}
        self.state["done"] = 0
        return done

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_a_loader_is_not_asked_for_the_state_that_it_has_just_loaded() -> None:
    position = {"given": 2, "begun": 1, "ended": False, "generators": [], "loader": {"done": 2}}
    passes = passes_over(Forgetful())
    passes.resume({**position, "before": random_state([])})
    assert [passes.position()["loader"] for _ in range(2)] == [{"done": 2}, {"done": 2}]
    assert list(passes) == [2, 3, 4]
    assert position["loader"] == {"done": 2}
