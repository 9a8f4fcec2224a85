"""As many batches on every rank; the other ranks' answers are written down here."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.loops.uneven import KeptTogether, PaddedBatches


def given(own: int, other: int) -> list[tuple[Any, bool, float]]:
    """What a rank with ``own`` batches gives beside one with ``other``."""
    asked = -1

    def gather(having: bool) -> list[bool]:
        nonlocal asked
        asked += 1
        return [having, asked < other]

    kept = KeptTogether(iter([(i, i == own - 1) for i in range(own)]), gather)
    return [(batch, last, kept.factor) for batch, last in kept]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (2, 2, [(0, False, 1), (1, True, 1)]),
        (3, 1, [(0, False, 1), (1, False, 2), (2, True, 2)]),  # the mean is over the ranks that have one
        (1, 3, [(0, False, 1), (0, False, 0), (0, True, 0)]),  # repeated, for nothing
        (0, 0, []),
    ],
)
def test_the_longest_rank_decides(own: int, other: int, expected: list[Any]) -> None:
    assert given(own, other) == expected


@pytest.mark.parametrize(("own", "other", "empty"), [(0, 2, 0), (2, 0, 1)])
def test_t36_a_rank_without_any_is_named_on_all(own: int, other: int, empty: int) -> None:
    with pytest.raises(ConfigurationError, match=f"no batch at all on rank {empty}"):
        given(own, other)


@pytest.mark.parametrize(
    ("counts", "rank", "expected"),
    [
        ([2, 2], 0, [(0, False, 1), (1, True, 1)]),
        ([3, 1], 0, [(0, False, 1), (1, False, 2), (2, True, 2)]),
        ([3, 1], 1, [(0, False, 1), (0, False, 0), (0, True, 0)]),
        ([3, 1, 2], 0, [(0, False, 1), (1, False, 1.5), (2, True, 3)]),
    ],
)
def test_known_lengths_need_no_question(counts: list[int], rank: int, expected: list[Any]) -> None:
    fetched: list[int] = []

    def source() -> Any:
        for number in range(counts[rank]):
            fetched.append(number)
            yield number, number == counts[rank] - 1

    padded = PaddedBatches(source(), counts, rank)
    found = []
    for number, (batch, last) in enumerate(padded):
        found.append((batch, last, padded.factor))
        assert len(fetched) == min(number + 1, counts[rank])  # nothing is fetched ahead
    assert found == expected


def test_a_pass_goes_on_behind_a_ranks_own_batches_with_the_one_it_is_given() -> None:
    padded = PaddedBatches(iter(()), [4, 2], 1, done=3)
    padded.batch = "last"
    assert [(*given, padded.factor) for given in padded] == [("last", True, 0)]


def test_a_loader_that_gives_less_than_it_promised_ends_its_pass() -> None:
    assert list(PaddedBatches(iter([(0, False)]), [3, 2], 0)) == [(0, False)]
