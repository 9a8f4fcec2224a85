"""Read traces of torch's Flight Recorder, its record of each rank's collectives: who waits in which; who is missing.

torch records them by default, also for Gloo. A trace is the JSON that torch writes, with the members of each group,
which torch does not always know there. This file reads traces without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Trace = Mapping[str, Any]

# Collectives to which each rank must bring a tensor of the same shape.
_SAME_SHAPES = ("all_reduce", "allreduce", "broadcast", "reduce_scatter")


@dataclass(frozen=True)
class Collective:
    """One collective of one rank.

    Attributes:
        group: name of its process group.
        description: what the group is for; "" where nothing was said.
        number: of the collective in its group, from 1.
        name: such as "gloo:all_reduce".
        shapes: of its input.
        since: when it began, in seconds of the machine's clock.
        between_two: it is a send or a receive, of which the trace does not name the other rank.
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


def taken() -> bytes:
    """Return the trace of this process, in which torch was imported."""
    c10d, dist = sys.modules["torch._C._distributed_c10d"], sys.modules["torch.distributed"]
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    trace = json.loads(dump()) if dump is not None else {}
    entries = list(trace.get("entries", ()))
    nccl = getattr(c10d, "_dump_nccl_trace_json", None)
    if nccl is not None and (own := json.loads(nccl()).get("entries")):
        known = {(each["process_group"][0], each["record_id"]) for each in entries}
        entries += [each for each in own if (each["process_group"][0], each["record_id"]) not in known]
    names = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
    members = {name: dist.get_process_group_ranks(group) for group, name in dict(names).items()}
    return json.dumps({"entries": entries, "members": members}).encode()


def waits_in(trace: Trace | None) -> Collective | None:
    """Return the oldest collective that has begun on this rank and has not ended; ``None`` where there is none."""
    active = [each for each in (trace or {}).get("entries", ()) if not each["retired"]]
    return _collective(min(active, key=lambda each: int(each["time_created_ns"]))) if active else None


def last(trace: Trace | None, group: str | None = None) -> Collective | None:
    """Return the collective that began last on this rank, or in one of its groups; ``None`` where there was none."""
    entries = [each for each in (trace or {}).get("entries", ()) if group in (None, each["process_group"][0])]
    if group is not None:
        entries = [each for each in entries if not each["is_p2p"]]
    return _collective(max(entries, key=lambda each: int(each["time_created_ns"]))) if entries else None


def missing(collective: Collective, trace: Trace, traces: Mapping[int, Trace | None]) -> dict[int, str]:
    """Return the ranks that a collective waits for, each with what its trace says about it.

    Args:
        collective: in which a rank waits.
        trace: of this rank.
        traces: of the ranks by their numbers; ``None``: that rank has given none.
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
    """Return why a rank with the trace ``other`` is not in this collective; "" if it is there, or has been."""
    reached = last(other, collective.group)
    if reached is None:
        return "has begun no collective of this group"
    if reached.number < collective.number:
        return f"has not come to it: its last one there was {reached}"
    same = _numbered(other, collective.group, collective.number)
    if same is None:  # it is so long ago that it was dropped
        return ""
    if same.name != collective.name:
        return f"has called another: {same}"
    if same.shapes != collective.shapes and collective.name.endswith(_SAME_SHAPES):
        return f"has called it with other shapes: {_listed(same)} instead of {_listed(collective)}"
    return ""


def _numbered(trace: Trace, group: str, number: int) -> Collective | None:
    for each in trace["entries"]:
        if each["process_group"][0] == group and each["collective_seq_id"] == number and not each["is_p2p"]:
            return _collective(each)
    return None


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
