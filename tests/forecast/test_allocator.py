"""The replay of torch's allocator: its rules on a few blocks, and what a GPU has recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.forecast.allocator import Allocator, reserved

MIB = 2**20
PACKED = Path(__file__).with_name("recorded_allocations.json.gz").read_bytes()
RECORDED: dict[str, Any] = json.loads(gzip.decompress(PACKED))
"""What benchmarks/gpu/allocations.py has written on an H200 with torch 2.11: allocations, as bytes and "a" or "b" for
two further streams, and "-n" where the one is freed that was made n allocations before; and the bytes of segments.
"""


@pytest.mark.parametrize("name", RECORDED)
def test_a_gpu_has_reserved_the_same_for_a_llama(name: str) -> None:
    allocator, blocks = Allocator(), list[Any]()
    live = peak = 0
    for word in RECORDED[name]["allocations"].split():
        if word.startswith("-"):
            size, block = blocks[int(word)]
            allocator.release(block)
            live -= size
        else:
            size = int(word.rstrip("ab"))
            blocks.append((size, allocator.allocate(size, word.lstrip("0123456789"))))
            peak, live = max(peak, live + size), live + size
    real = RECORDED[name]["reserved"]
    assert allocator.reserved == pytest.approx(real, rel=0.001)
    assert peak < 0.9 * real  # the control: without fragments, it were much less


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([10 * MIB - 512, 10 * MIB - 512], 20 * MIB),
        ([10 * MIB, 11 * MIB], 22 * MIB),
        ([19 * MIB], 20 * MIB),
    ],
)
def test_segments(sizes: list[int], segments: int) -> None:
    allocator = Allocator()
    for size in sizes:
        allocator.allocate(size, "")
    assert allocator.reserved == segments


def test_freed_neighbours_are_joined_and_the_smallest_block_is_taken() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB, "") for size in (40, 12)]
    for block in blocks:
        allocator.release(block)
    first = [allocator.allocate(size * MIB, "") for size in (12, 20, 20)]
    assert allocator.reserved == 52 * MIB
    assert first[0].at == blocks[1].at
    for block in (first[1], first[2]):
        allocator.release(block)
    allocator.allocate(40 * MIB, "")
    assert allocator.reserved == 52 * MIB
    allocator.allocate(12 * MIB, "another stream")
    assert allocator.reserved == 64 * MIB


def test_events_of_the_set_up_count_by_what_they_leave() -> None:
    def event(storage: int, size: int) -> Any:
        return SimpleNamespace(storage=storage, size=size * MIB)

    events = [event(0, 100), event(1, 30), event(0, -100), event(2, 30), event(2, -30), event(3, 24)]
    assert reserved(events, lambda storage: "", first=3) == 60 * MIB
    assert reserved(events, lambda storage: "", first=0) == 130 * MIB


def test_a_storage_that_shrinks_to_nothing_can_grow_again() -> None:
    events = [SimpleNamespace(storage=0, size=size * MIB) for size in (30, -30, 30)]
    assert reserved(events, lambda storage: "", first=0) == 30 * MIB
