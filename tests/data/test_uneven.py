"""As many batches on every rank; the other ranks' answers are written down here."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.data.uneven import KeptTogether
from drivetrain.errors import ConfigurationError


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
