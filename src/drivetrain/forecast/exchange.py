"""Compute the shortest time of a window (the batches of one optimizer step), including exchanges between ranks, which
can overlap with operations.
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
"""The operation with which FSDP2 copies a rank's shards before the all_gather. The copy reads only parameters. The copy
and the all_gather run on another stream, and therefore do not wait for earlier operations.
"""


def spread(ranks: Ranks, per_machine: int) -> tuple[int, int]:
    """Return the number of machines with ranks of a group, and the number of these ranks on each machine.

    Args:
        per_machine: how many ranks of the job each machine has. Consecutive ranks are on one machine.
    """
    here = min(ranks.count, max(1, per_machine // ranks.stride))
    return math.ceil(ranks.count / here), here


def exchange_time(exchange: Exchange, device: Device, per_machine: int) -> float:
    """Return the shortest time of a collective in seconds. NCCL has a protocol with full bandwidth and a protocol with
    low latency, of which the faster one counts. For all_reduce, the faster of rings and trees counts.
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
    # Each rank of a machine has a network card, and NCCL uses one ring per card.
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
    """The shortest time of a window (the batches of one optimizer step), in seconds.

    Attributes:
        step: the time of the window.
        operations: the sum of the kernels' times.
        arithmetic: the part of ``operations`` in which floating-point operations are the limit. Otherwise memory is the
            limit.
        exchange: the sum of the exchanges' times.
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
        """Return the forecast as one line of text."""
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
    """Return the shortest time of a window.

    The forecast assumes that Python issues a step, which is an operation or an exchange, every ``device.launch_s``
    seconds. Operations run one after the other. The exchanges of a group also run one after the other, at the same time
    as operations. An exchange starts when all earlier operations have ended. The operations from index ``waited_on_at``
    on start when the exchange has ended. DDP's buckets and FSDP2's reduce_scatters therefore overlap with the rest of
    the backward pass. An exchange of tensor parallelism does not overlap. FSDP2 gathers one group of parameters in
    advance. An all_gather of FSDP2 therefore starts as soon as the rank has waited for the previous all_gather.

    Args:
        per_machine: the number of ranks on each machine.
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
    """Return the shortest time of a window.

    Args:
        recorded: the recorded window. If a window has more than two batches, only the first two are recorded.
        batches: the number of batches in the window. A batch that was not recorded takes the time of the first batch,
            which exchanges no gradients.
        per_machine: the number of ranks on each machine.
    """
    steps = fused(recorded.steps) if recorded.is_compiled else recorded.steps
    tf32 = recorded.allows_tf32
    told = forecast(steps, device, per_machine, tf32=tf32)
    # each batch has a bubble, because the pipeline is filled and emptied for each batch
    if recorded.pipeline is not None:
        factor = batches / min(batches, 2)
        return in_pipeline(Forecast(*(factor * each for each in astuple(told))), *recorded.pipeline)
    ends = (at for at in range(1, len(steps)) if steps[at].phase == "forward" and steps[at - 1].phase != "forward")
    if batches <= 2 or (end := next(ends, None)) is None:
        return told
    first = forecast(steps[:end], device, per_machine, tf32=tf32)
    return Forecast(*(one + (batches - 2) * more for one, more in zip(astuple(told), astuple(first), strict=True)))


def _copy_in(steps: Sequence[Step], index: int) -> Operation | None:
    """Return the operation :data:`COPY_IN` before the exchange at ``index``. Return ``None`` if the exchange does not
    gather FSDP2's parameters.
    """
    earlier = (steps[at] for at in range(index - 1, -1, -1))
    before = next((each for each in earlier if isinstance(each, Exchange) or is_launched(each)), None)
    return before if isinstance(before, Operation) and before.name == COPY_IN else None


def in_pipeline(window: Forecast, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Forecast:
    """Add the bubble to the forecast of a pipeline's rank. The bubble is the time in which the rank waits for other
    stages.

    A rank waits before its first micro-batch, and after its last micro-batch. With GPipe and 1F1B, both waits together
    take as long as ``ranks - 1`` micro-batches. With several stages per rank (interleaved 1F1B) the waits are shorter,
    because a micro-batch arrives after only one stage of each other rank.

    Args:
        window: the forecast without the bubble, for all micro-batches.
    """
    bubble = window.step * (ranks - 1) / (micro_batches * stages_per_rank)
    return replace(window, step=window.step + bubble, bubble=bubble)


def fastest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort names by time, the fastest first. Return each name and its time as a multiple of the shortest time."""
    order = sorted(seconds, key=lambda name: seconds[name])
    return [(name, seconds[name] / seconds[order[0]]) for name in order]
