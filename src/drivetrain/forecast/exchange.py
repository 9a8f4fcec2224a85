"""Compute the shortest time of a window (the batches of one optimizer step): the time of each exchange between ranks,
and how much of it overlaps with operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from drivetrain.errors import ConfigurationError
from drivetrain.forecast.devices import BASE_S, QUICK_BASE_S, Device
from drivetrain.forecast.operations import Exchange, Operation, Ranks, Recorded
from drivetrain.forecast.roofline import Step, arithmetic, duration, fused, is_launched

COPY_IN = "fsdp.all_gather_copy_in"
"""The operation with which FSDP2 copies a rank's shards before it gathers them. The copy reads only parameters. So the
copy and the all_gather run on another stream, and do not wait for operations that were issued earlier."""


def spread(ranks: Ranks, per_machine: int) -> tuple[int, int]:
    """Return the number of machines on which a group's ranks are, and the number of these ranks on each machine.

    Args:
        per_machine: how many ranks of the job each machine has; consecutive ranks are on the same machine.
    """
    here = min(ranks.count, max(1, per_machine // ranks.stride))
    return math.ceil(ranks.count / here), here


def exchange_time(exchange: Exchange, device: Device, per_machine: int) -> float:
    """Return the least seconds that a collective takes: with NCCL's protocol of full bandwidth or the one of low
    latency, in a ring or (only all_reduce) in a tree, whichever is fastest.
    """
    if exchange.group_ranks.count < 2:
        return 0.0
    return min(_time(exchange, device, per_machine, quick) for quick in (False, True))


def _time(exchange: Exchange, device: Device, per_machine: int, quick: bool) -> float:
    ranks = exchange.group_ranks.count
    machines, here = spread(exchange.group_ranks, per_machine)
    near = device.link(between=False) if here > 1 else None
    far = device.link(between=True) if machines > 1 else None
    base, share = (QUICK_BASE_S, 0.5) if quick else (BASE_S, 1.0)
    near_hop, far_hop = ((link.quick_hop_s if quick else link.hop_s) if link else 0.0 for link in (near, far))
    near_speed, far_speed = (link.bytes_per_s * share if link else math.inf for link in (near, far))
    if exchange.name == "all_to_all":
        in_machine, outside = (here - 1) / ranks, (ranks - here) / ranks
        return base + max(near_hop, far_hop) + exchange.bytes * max(in_machine / near_speed, outside / far_speed)
    if exchange.name in ("send", "recv"):
        return base + max(near_hop, far_hop) + exchange.bytes / min(near_speed, far_speed)
    # Each of a machine's ranks has its own network card, and NCCL runs one ring through each card.
    speed = min(near_speed, far_speed * here)
    hops = (ranks - machines) * near_hop + (machines - 1) * far_hop
    if exchange.name in ("all_gather", "reduce_scatter"):
        return base + hops + exchange.bytes * (ranks - 1) / ranks / speed
    if exchange.name == "broadcast":
        return base + hops + exchange.bytes / speed
    if exchange.name == "all_reduce":
        ring = 2 * hops + 2 * exchange.bytes * (ranks - 1) / ranks / speed
        tree = 2 * ((here - 1) * near_hop + math.log2(machines) * far_hop) + 2 * exchange.bytes / speed
        return base + min(ring, tree)
    raise ConfigurationError(
        f"The time of the exchange {exchange.name!r} is not known; known are all_gather, reduce_scatter, all_reduce, "
        "all_to_all, broadcast, send and recv."
    )


@dataclass(frozen=True)
class Forecast:
    """The shortest time that a window can take, in seconds.

    Attributes:
        step: the window.
        operations: kernels of the program, one after the other.
        arithmetic: the part of ``operations`` that floating-point operations limit; memory limits the rest.
        exchange: all exchanges, one after the other.
        exposed: the part of ``step`` in which the device only waits for exchanges.
        launch: the part of ``step`` in which the device only waits for Python.
        bubble: the part of ``step`` in which the device only waits for other stages of a pipeline.
    """

    step: float
    operations: float
    arithmetic: float
    exchange: float
    exposed: float
    launch: float
    bubble: float = 0.0

    def __str__(self) -> str:
        """Return the forecast in a line."""
        memory, hidden = self.operations - self.arithmetic, self.exchange - self.exposed
        parts = [f"{_seconds(self.arithmetic)} of arithmetic", f"{_seconds(memory)} of memory"]
        if self.exchange:
            more = f", {_seconds(hidden)} more are hidden" if hidden > 0 else ""
            parts.append(f"{_seconds(self.exposed)} of exchanges{more}")
        for name, value in (("of waiting for Python", self.launch), ("of the pipeline's bubble", self.bubble)):
            if value > 0.01 * self.step:
                parts.append(f"{_seconds(value)} {name}")
        return f"at best {_seconds(self.step)} a step ({'; '.join(parts)})"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def forecast(steps: Sequence[Step], device: Device, per_machine: int, *, tf32: bool = False) -> Forecast:
    """Return the time of a window at best.

    The forecast assumes that Python issues one step (an operation or an exchange) every ``device.launch_s``, in order.
    Operations run one after the other. At the same time, the exchanges of each group run one after the other. An
    exchange starts when the operations that were issued before it have ended. The operations from index
    ``waited_on_at`` on start when the exchange has ended. So DDP's buckets and FSDP2's reduce_scatters overlap with the
    rest of the backward pass, and an exchange of tensor parallelism overlaps with nothing. An all_gather of FSDP2's
    parameters starts earlier, because FSDP2 gathers one group of parameters in advance: it starts when the rank has
    waited for the previous all_gather.

    Args:
        per_machine: ranks on each machine.
        tf32: as in :func:`drivetrain.forecast.roofline.duration`.
    """
    now = issued = busy = limited = exchanged = exposed = idle = 0.0
    free: dict[Ranks, float] = {}
    opened: dict[Ranks, float] = {}
    waits: dict[int, list[tuple[float, Ranks | None]]] = {}
    for index in range(len(steps) + 1):
        for end, prefetched in waits.pop(index, ()):
            exposed += max(0.0, end - now)
            now = max(now, end)
            if prefetched is not None:
                opened[prefetched] = now
        step = steps[index] if index < len(steps) else None
        if isinstance(step, Operation) and is_launched(step) and step.name != COPY_IN:
            issued += device.launch_s
            idle += max(0.0, issued - now)
            now = max(now, issued)
            seconds, computing = duration(step, device, tf32=tf32), arithmetic(step, device, tf32=tf32)
            now, busy, limited = now + seconds, busy + seconds, limited + (seconds if computing == seconds else 0.0)
        elif isinstance(step, Exchange):
            issued += device.launch_s
            copy, group = _copy_in(steps, index), step.group_ranks
            seconds = exchange_time(step, device, per_machine) + (duration(copy, device) if copy else 0.0)
            start = max(opened.get(group, 0.0) if copy else now, free.get(group, 0.0))
            free[group] = end = start + seconds
            exchanged += seconds
            waits.setdefault(min(step.waited_on_at, len(steps)), []).append((end, group if copy else None))
    return Forecast(now, busy, limited, exchanged, exposed, idle)


def of_window(recorded: Recorded, batches: int, device: Device, per_machine: int) -> Forecast:
    """Return the time of a window at best.

    Args:
        recorded: the window; if it has more than two batches, the first two.
        batches: the batches of the window. Further batches are taken to repeat the first, because only the last batch
            exchanges gradients.
        per_machine: ranks on each machine.
    """
    steps = fused(recorded.steps) if recorded.is_compiled else recorded.steps
    tf32 = recorded.allows_tf32
    told = forecast(steps, device, per_machine, tf32=tf32)
    # the pipeline is filled and emptied in each batch, so the bubble occurs once per batch
    if recorded.pipeline is not None:
        factor = batches / min(batches, 2)
        return in_pipeline(Forecast(*(factor * each for each in astuple(told))), *recorded.pipeline)
    ends = (at for at in range(1, len(steps)) if steps[at].phase == "forward" and steps[at - 1].phase != "forward")
    if batches <= 2 or (end := next(ends, None)) is None:
        return told
    first = forecast(steps[:end], device, per_machine, tf32=tf32)
    return Forecast(*(one + (batches - 2) * more for one, more in zip(astuple(told), astuple(first), strict=True)))


def _copy_in(steps: Sequence[Step], index: int) -> Operation | None:
    """Return the copy :data:`COPY_IN` that belongs to the exchange at ``index``; ``None`` if the exchange does not
    gather FSDP2's parameters.
    """
    earlier = (steps[at] for at in range(index - 1, -1, -1))
    before = next((each for each in earlier if isinstance(each, Exchange) or is_launched(each)), None)
    return before if isinstance(before, Operation) and before.name == COPY_IN else None


def in_pipeline(window: Forecast, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Forecast:
    """Return the forecast of a rank of a pipeline: ``window``, plus the bubble (the time in which the rank waits for
    other stages).

    A rank waits before its first micro-batch arrives, and after its last one has left. With GPipe and 1F1B the rank
    waits for the time that it takes to compute ``ranks - 1`` micro-batches. With several stages on each rank
    (interleaved 1F1B) the wait is shorter, because a micro-batch passes only one stage of each other rank before it
    arrives.

    Args:
        window: all micro-batches of the rank.
    """
    bubble = window.step * (ranks - 1) / (micro_batches * stages_per_rank)
    return replace(window, step=window.step + bubble, bubble=bubble)


def fastest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort runs that do the same work, the fastest first; return their names, and their times as multiples of the
    fastest run's time.
    """
    order = sorted(seconds, key=lambda name: seconds[name])
    return [(name, seconds[name] / seconds[order[0]]) for name in order]
