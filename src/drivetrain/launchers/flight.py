"""Read the traces of torch's Flight Recorder, which records collectives. Find the ranks that wait in a collective, and
the ranks that are missing there.

torch records collectives by default, also with Gloo. torch 2.9 records them only if an environment variable is set. A
trace is a dictionary in the form of torch's JSON. This file adds the members of each process group, because torch
sometimes leaves out the members. This file reads traces without importing torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.base.lazy import on_first_use

with on_first_use:
    from drivetrain.base import torch_private


Trace = Mapping[str, Any]

# Two environment variables that set how many collectives torch records: the current one and an earlier one.
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

# Collectives for which all ranks must pass tensors of the same shape.
_SAME_SHAPES = ("all_reduce", "allreduce", "broadcast", "reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Attributes:
        group: the name of the process group.
        description: torch's description of the group, or "".
        number: the collective's number in its group, from 1.
        name: the operation, such as "gloo:all_reduce".
        shapes: the shapes of the input tensors.
        since: the time when the collective began, in seconds since the epoch.
        between_two: whether the operation is a send or a receive. The trace does not show the other rank of a send or a
            receive.
    """

    group: str
    description: str
    number: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    since: float
    between_two: bool = False

    def __str__(self) -> str:
        if self.between_two:
            return f"{self.name} number {self.number} of {self._group}"
        return f"collective {self.number} of {self._group}, {self.name}"

    @property
    def _group(self) -> str:
        known = self.description not in ("", "undefined")
        return f"the group {self.description if known else self.group!r}"


def record_collectives() -> None:
    """Let torch 2.9 record collectives as later versions of torch do. If the user has set one of the variables, change
    nothing.

    Call this function before the first process group is created, because torch then reads the variable.
    """
    if not any(name in os.environ for name in _SIZES):
        os.environ[_SIZES[0]] = "2000"


def taken() -> bytes:
    """Return the trace of this process. The process must have imported torch."""
    dist = sys.modules["torch.distributed"]
    entries: list[Any] = []
    for record in torch_private.flight_records():  # with NCCL there is a second record, which repeats entries
        known = {(each["process_group"][0], each["record_id"]) for each in entries}
        own = json.loads(record).get("entries") or ()
        entries += [each for each in own if (each["process_group"][0], each["record_id"]) not in known]
    names = torch_private.world.pg_names if dist.is_initialized() else {}
    members = {name: dist.get_process_group_ranks(group) for group, name in dict(names).items()}
    return json.dumps({"entries": entries, "members": members}).encode()


def waits_in(trace: Trace | None) -> Collective | None:
    """Return the rank's oldest unfinished collective, or ``None``."""
    active = [each for each in _entries(trace) if not each["retired"]]
    return _collective(min(active, key=lambda each: int(each["time_created_ns"]))) if active else None


def last(trace: Trace | None, group: str | None = None) -> Collective | None:
    """Return the rank's most recent collective, or ``None``. With ``group``, consider only collectives of this
    group.
    """
    entries = _entries(trace, group)
    return _collective(max(entries, key=lambda each: int(each["time_created_ns"]))) if entries else None


def missing(collective: Collective, trace: Trace, traces: Mapping[int, Trace | None]) -> dict[int, str]:
    """Return the ranks that have not joined a collective. The values are the reasons.

    Args:
        collective: a collective in which a rank waits.
        trace: the trace of the waiting rank.
        traces: the traces of this machine's ranks. ``None`` for a rank that has not answered.
    """
    found: dict[int, str] = {}
    if collective.between_two:
        return found
    for rank in trace["members"].get(collective.group, sorted(traces)):
        other = traces.get(rank)
        if other is None:
            found[rank] = "gave no trace of its collectives" if rank in traces else "runs on another machine"
        elif why := _absence(collective, other):
            found[rank] = why
    return found


def _absence(collective: Collective, other: Trace) -> str:
    """Return why a rank is not in this collective, according to its trace ``other``. Return "" if the rank is or was in
    the collective.
    """
    reached = last(other, collective.group)
    if reached is None:
        return "has begun no collective of this group"
    if reached.number < collective.number:
        return f"has not come to it: its last one there was {reached}"
    found = [each for each in _entries(other, collective.group) if each["collective_seq_id"] == collective.number]
    if not found:  # torch keeps only the most recent collectives
        return ""
    same = _collective(found[0])
    if same.name != collective.name:
        return f"has called another: {same}"
    if same.shapes != collective.shapes and collective.name.endswith(_SAME_SHAPES):
        return f"has called it with other shapes: {_listed(same)} instead of {_listed(collective)}"
    return ""


def _entries(trace: Trace | None, group: str | None = None) -> list[Any]:
    """Return the entries of a trace. With ``group``, return only the collectives of this group, without sends and
    receives.
    """
    found = (trace or {}).get("entries", ())
    return [each for each in found if group is None or (each["process_group"][0] == group and not each["is_p2p"])]


def _listed(collective: Collective) -> str:
    return " ".join(str(list(shape)) for shape in collective.shapes)


def _collective(entry: Mapping[str, Any]) -> Collective:
    group, description = entry["process_group"]
    return Collective(
        group=group,
        description=description,
        number=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
        name=entry["profiling_name"],
        shapes=tuple(tuple(int(size) for size in shape) for shape in entry["input_sizes"]),
        since=int(entry["time_created_ns"]) / 1e9,
        between_two=bool(entry["is_p2p"]),
    )
