"""What a rank does with 1,024 ranks is what it does with 32: counts of ``benchmarks/many_ranks.py``; times are in
RESULTS.md.
"""

from __future__ import annotations

from typing import Any

import pytest

FEW, MANY = 32, 1_024
MACHINES = MANY // 8
STEPS = ("set-up", "agreement checks", "log flush", "checkpoint")


@pytest.mark.parametrize("is_first", [True, False], ids=["rank 0", "a rank that writes"])
def test_nothing_that_a_rank_exchanges_or_calls_grows_with_the_ranks(benchmark: Any, is_first: bool) -> None:
    """But the list of files in the checkpoint, which has an entry for each machine and which rank 0 writes."""
    few, many = (benchmark.in_own_process(0 if is_first else benchmark.writer_of(size), size) for size in (FEW, MANY))
    for step in STEPS:
        # numbers in names are longer, and random numbers in states may be
        assert many[f"{step} bytes"] <= 1.02 * few[f"{step} bytes"] + 16, step
        assert few[f"{step} bytes"] > 0
    assert few["sampler bytes"] == many["sampler bytes"] == 0
    entries = (MACHINES - FEW // 8) * is_first
    # each entry is walked through and encoded
    name = "calls of a flush, a check and a save"
    assert many[name] <= few[name] + 3 * entries + 20
    assert many["bytes of the file"] <= 1.02 * few["bytes of the file"] + 160 * entries + 64


def test_requests_to_the_store_do_not_grow_with_the_ranks(benchmark: Any) -> None:
    few, many = benchmark.protocols(FEW), benchmark.protocols(MANY)
    assert few.keys() == many.keys()
    for what, ranks in many.items():
        requests, before = ([one for one, _ in each] for each in (ranks, few[what]))
        assert len(ranks) == MANY
        if what == "a stop":  # ranks that raise one number at the same time try again
            assert sum(requests) <= 12 * MANY
            continue
        # a save collects in a tree of which each rank has up to eight branches, three levels deep
        assert max(requests) <= (max(before) + 16 if what == "a save in the background" else max(before)), what
        assert requests[0] <= (3 + 2 * 8 if what == "a save in the background" else before[0]), what
        sent, sent_before = (max(bytes_ for _, bytes_ in each) for each in (ranks, few[what]))
        entries = MACHINES * 150 if what == "a save in the background" else 0  # the list of files
        assert sent <= sent_before + 16 + entries, what


def test_what_grows_is_counted(benchmark: Any) -> None:
    """The negative control: a rank that asks for a key of each of the others."""
    found = []
    for size in (2, 8):
        store = benchmark.CountingStore(benchmark.Shared())
        for rank in range(size):
            store.set(f"key/{rank}", "1")
        for rank in range(size):
            store.get(f"key/{rank}")
        store.check([f"key/{rank}" for rank in range(size)])
        found.append((store.requests, store.bytes))
    assert [requests for requests, _ in found] == [2 * 2 + 1, 2 * 8 + 1]
    assert found[1][1] == 4 * found[0][1]
