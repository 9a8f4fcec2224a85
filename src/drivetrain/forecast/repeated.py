"""Extrapolate the record of a window from models with two and with three blocks to the model with all blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from drivetrain.forecast.operations import Exchange, Operation

Step = Operation | Exchange
_COMPUTED = ("forward", "recompute", "backward")


def repeated(few: Sequence[Step], more: Sequence[Step], length: int) -> tuple[Step, ...]:
    """Return the steps of a window of a model with ``length`` blocks.

    In each phase, ``more`` has the steps of ``few`` and the steps of one more block. The result repeats these
    additional steps for each further block. An optimizer's step, for example, moves more bytes in ``more`` than in
    ``few``. Each further block adds the difference to this step. DDP's buckets are not parts of blocks. The result
    divides all gradients into buckets of equal size, and distributes the buckets evenly.

    Args:
        few: the steps with two blocks.
        more: the steps with three blocks.
    """
    olds, news = _runs(few), _runs(more)
    if len(olds) != len(news):
        return tuple(more)
    is_ddp = {(each.name, each.phase) for each in more if isinstance(each, Exchange) and each.phase in _COMPUTED} == {
        ("all_reduce", "backward")
    }
    found: list[Step] = []
    begins = 0  # index in ``more`` at which the phase begins
    at: dict[int, int] = {}  # index in more -> index in found
    waiting: list[tuple[int, int, Exchange, int]] = []  # index in found, index in more, exchange, size of a block
    for old, new in zip(olds, news, strict=True):
        before, taken = ([each for each in run if is_ddp and _is_bucket(each)] for run in (old, new))
        old, new = ([each for each in run if not (is_ddp and _is_bucket(each))] for run in (old, new))
        place = _inserted(old, new)
        start, size = place or (len(new), 0)
        if place is None and len(old) == len(new):
            new = [_grown(one, other, length - 3) for one, other in zip(old, new, strict=True)]
        order = [*range(start), *(length - 2) * [*range(start, start + size)], *range(start + size, len(new))]
        if place is None and len(old) < len(new):  # DDP's exchanges are between the steps of the block
            middle = [index for index, each in enumerate(new) if each.block.rpartition(".")[2] == "1"]
            rest = [index for index in range(len(new)) if index not in set(middle)]
            cut = next((at for at, index in enumerate(rest) if middle and index > middle[0]), len(rest))
            order = [*rest[:cut], *(length - 2) * middle, *rest[cut:]]
        first = len(found)
        for index in order:
            step = new[index]
            at.setdefault(begins + index, len(found))
            if isinstance(step, Exchange):
                waiting.append((len(found), begins + index, step, size))
            found.append(step)
        if taken:
            _spread(found, first, before, taken, length)
        begins += len(new) + len(taken)
    at[len(more)] = len(found)
    for here, source, step, size in waiting:
        ahead = step.waited_on_at - source
        until = here + ahead if ahead <= size else max(at.get(step.waited_on_at, len(found)), here + 1)
        found[here] = replace(step, waited_on_at=until)
    return tuple(found)


def _runs(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps of each phase. Recomputed steps belong to the backward pass."""
    return [list(run) for _, run in groupby(steps, key=lambda each: each.phase.replace("recompute", "backward"))]


def _key(step: Step, labels: bool) -> tuple[Any, ...]:
    in_block = labels and bool(step.block)
    if isinstance(step, Exchange):
        return in_block, step.name, step.group_ranks, step.bytes, step.dtype
    return in_block, step.name, step.dtype, step.flops, step.bytes_moved


def _inserted(old: list[Step], new: list[Step]) -> tuple[int, int] | None:
    """Return the index at which ``new`` has additional steps, and the number of these steps. Return ``None`` if ``new``
    differs from ``old`` in several places.
    """
    size = len(new) - len(old)
    for labels in (True, False):  # with labels, _key also tells whether a step belongs to a block
        one, other = ([_key(each, labels) for each in run] for run in (old, new))
        start = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        if size >= 0 and one[start:] == other[start + size :]:
            return start, size
    return None


def _grown(few: Step, more: Step, blocks: int) -> Step:
    if isinstance(few, Exchange) and isinstance(more, Exchange):
        return replace(more, bytes=more.bytes + blocks * (more.bytes - few.bytes))
    if isinstance(few, Operation) and isinstance(more, Operation):
        flops = more.flops + blocks * (more.flops - few.flops)
        return replace(more, flops=flops, bytes_moved=more.bytes_moved + blocks * (more.bytes_moved - few.bytes_moved))
    return more


def _is_bucket(step: Step) -> bool:
    return isinstance(step, Exchange) and step.phase == "backward"


def _spread(found: list[Step], first: int, before: list[Any], taken: list[Any], length: int) -> None:
    """Distribute the exchanges of DDP's buckets among the steps of ``found`` from index ``first`` on."""
    sizes = [sum(each.bytes for each in buckets) for buckets in (before, taken)]
    total = sizes[1] + (length - 3) * (sizes[1] - sizes[0])
    largest = max(taken, key=lambda each: each.bytes)
    count = max(len(taken), math.ceil(total / largest.bytes))
    steps, end = len(found) - first, len(found) + count
    for number in range(count, 0, -1):
        bucket = replace(largest, bytes=total // count, waited_on_at=end)
        found.insert(first + steps * number // count, bucket)
