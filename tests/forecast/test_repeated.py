from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from drivetrain.forecast.operations import Exchange, Operation, Phase, Ranks
from drivetrain.forecast.repeated import Step, repeated


def kernel(name: str, moved: int = 8, phase: Phase = "forward") -> Operation:
    return Operation(name, "bfloat16", 0, moved, phase, "", "")


def gather(until: int, phase: Phase = "forward", name: str = "all_gather") -> Exchange:
    return Exchange(name, Ranks(8, 1), 100, "bfloat16", phase, "", until)


def sharded(blocks: int) -> list[Step]:
    """FSDP: each block is gathered before it is used, in the backward pass one in advance. The rank waits for the sums
    of gradients before the optimizer's step.
    """
    steps: list[Any] = [kernel("begin", 5)]
    for _ in range(blocks):
        steps += [gather(len(steps) + 1), kernel("copy"), kernel("a", 1), kernel("b", 2)]
    steps += [kernel("loss", 7), gather(-1, "backward"), kernel("head", 6, "backward")]
    open_, sums = len(steps) - 2, []
    for block in range(blocks):
        steps[open_] = gather(len(steps), "backward")
        steps += [kernel("copy", 8, "backward")]
        if block < blocks - 1:
            open_ = len(steps)
            steps += [gather(-1, "backward")]
        steps += [kernel("b", 4, "backward"), kernel("a", 3, "backward")]
        sums.append(len(steps))
        steps += [gather(-1, "backward", "reduce_scatter")]
    steps += [kernel("end", 9, "backward")]
    for each in sums:
        steps[each] = gather(len(steps), "backward", "reduce_scatter")
    return [*steps, kernel("norm", 10 + 5 * blocks, "clip"), kernel("foreach", 100 * blocks, "optimizer")]


@pytest.mark.parametrize("length", [3, 4, 8, 40])
def test_two_and_three_blocks_tell_all_steps_of_many(length: int) -> None:
    """With their exchanges, in their order, and what each one is waited for at."""
    assert list(repeated(sharded(2), sharded(3), length)) == sharded(length)


def replicated(blocks: int) -> list[Step]:
    """DDP: buckets of 250 bytes at most; a block has gradients of 100."""
    back: list[Any] = []
    for number in range(blocks):
        back += [kernel("a", 3, "backward"), kernel("b", 4, "backward")]
        if number % 2:
            back.append(Exchange("all_reduce", Ranks(8, 1), 200, "float32", "backward", "", -1))
    if blocks % 2:
        back.append(Exchange("all_reduce", Ranks(8, 1), 100, "float32", "backward", "", -1))
    return [*(kernel("f", 2) for _ in range(blocks)), *back, kernel("step", 50 * blocks, "optimizer")]


@pytest.mark.parametrize("length", [3, 8, 9])
def test_buckets_become_as_many_as_the_gradients_need(length: int) -> None:
    found, whole = repeated(replicated(2), replicated(3), length), replicated(length)
    assert Counter(each.name for each in found) == Counter(each.name for each in whole)
    buckets = [(at, each) for at, each in enumerate(found) if isinstance(each, Exchange)]
    assert sum(each.bytes for _, each in buckets) == 100 * length
    assert {each.waited_on_at for _, each in buckets} == {len(found) - 1}  # the optimizer's step
    assert found[-1] == whole[-1]
    # spread over the backward pass: the first one comes before its second half begins
    assert buckets[0][0] <= length + 2 * length // 2 + 1
    assert found[buckets[-1][0] - 1].phase == "backward"
    assert found[buckets[-1][0] + 1].phase == "optimizer"


def test_several_batches_of_a_window_are_repeated_each() -> None:
    def twice(blocks: int) -> list[Step]:
        batch = [*(kernel("f", 2) for _ in range(blocks)), *(kernel("b", 3, "backward") for _ in range(blocks))]
        return [*batch, *batch]

    assert list(repeated(twice(2), twice(3), 9)) == twice(9)


def test_records_that_differ_in_their_phases_are_left_as_they_are() -> None:
    few, more = [kernel("a"), kernel("b", 1, "backward")], [kernel("a")]
    assert list(repeated(few, more, 9)) == more
