"""Traces of ranks that hung, written by torch: who waits in which collective, and who is missing there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.launchers import flight

TRACES = Path(__file__).parent / "traces"
ALL_REDUCE = "collective 2 of the group 'default_pg', gloo:all_reduce"
BARRIER = "collective 2 of the group 'default_pg', gloo:barrier"
BEFORE = "has not come to it: its last one there was collective 1 of the group 'default_pg', gloo:all_reduce"

# For each kind of fault: where each rank waits, and whom it misses there.
FAULTS: dict[str, dict[int, tuple[str, dict[int, str]]]] = {
    "dead": {0: (ALL_REDUCE, {1: "gave no trace of its collectives"})},
    "behind": {0: (ALL_REDUCE, {1: BEFORE})},
    "two_of_three_behind": {0: (ALL_REDUCE, {1: BEFORE, 2: BEFORE})},
    "other_collective": {
        0: (ALL_REDUCE, {1: f"has called another: {BARRIER}"}),
        1: (BARRIER, {0: f"has called another: {ALL_REDUCE}"}),
    },
    "other_shapes": {
        0: (ALL_REDUCE, {1: "has called it with other shapes: [4] instead of [3]"}),
        1: (ALL_REDUCE, {0: "has called it with other shapes: [3] instead of [4]"}),
    },
    "crossed_groups": {
        0: ("collective 1 of the group 'every', gloo:all_reduce", {1: "has begun no collective of this group"}),
        1: (ALL_REDUCE, {0: BEFORE}),
    },
    "group_of_two": {
        0: ("collective 1 of the group '2', gloo:all_reduce", {1: "has begun no collective of this group"})
    },
    "receive": {},  # Gloo records no sends and receives
    "broadcast": {0: ("collective 2 of the group 'default_pg', gloo:broadcast", {2: BEFORE})},
}  # fmt: skip


def stored(fault: str) -> dict[int, Any]:
    return {int(rank): trace for rank, trace in json.loads((TRACES / f"{fault}.json").read_text()).items()}


def test_each_stored_trace_has_its_test() -> None:
    assert {path.stem for path in TRACES.glob("*.json")} == FAULTS.keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_trace_of_a_fault_tells_who_waits_where_and_who_is_missing(fault: str) -> None:
    traces = stored(fault)
    found = {}
    for rank, trace in traces.items():
        waits = flight.waits_in(trace)
        if waits is not None:
            found[rank] = str(waits), flight.missing(waits, trace, traces)
    assert found == FAULTS[fault]


def test_no_rank_is_missing_where_all_have_come() -> None:
    """Negative control: a collective that all have begun is slow, and lacks none."""
    trace = stored("behind")[0]
    waits = flight.waits_in(trace)
    assert waits is not None
    assert flight.missing(waits, trace, {0: trace, 1: trace}) == {}


def test_a_rank_of_another_machine_is_named() -> None:
    trace = stored("two_of_three_behind")[0]
    waits = flight.waits_in(trace)
    assert waits is not None
    assert flight.missing(waits, trace, {0: trace, 1: trace}) == {2: "runs on another machine"}


def test_shapes_may_differ_where_ranks_bring_different_parts() -> None:
    traces = stored("other_shapes")
    for trace in traces.values():
        trace["entries"][-1]["profiling_name"] = "gloo:all_to_all"
    waits = flight.waits_in(traces[0])
    assert waits is not None
    assert flight.missing(waits, traces[0], traces) == {}


def test_of_a_send_only_the_name_is_known() -> None:
    trace = stored("behind")[0]
    trace["entries"][-1] |= {"is_p2p": True, "p2p_seq_id": 7, "profiling_name": "nccl:recv 0<-1"}
    waits = flight.waits_in(trace)
    assert str(waits) == "nccl:recv 0<-1 number 7 of the group 'default_pg'"
    assert waits is not None
    assert flight.missing(waits, trace, {0: trace, 1: None}) == {}


def test_the_last_collective_is_known_also_when_it_has_ended() -> None:
    assert str(flight.last(stored("behind")[1])) == "collective 1 of the group 'default_pg', gloo:all_reduce"
    assert flight.last({"entries": [], "members": {}}) is None
    assert flight.last(None) is None


def test_a_process_without_collectives_has_an_empty_trace() -> None:
    assert not dist.is_initialized()
    assert json.loads(flight.taken())["members"] == {}


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_torch_records_as_many_collectives_as_the_user_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "0")
    flight.record_collectives()
    assert {
        each: value for each, value in os.environ.items() if each.endswith(("_FR_BUFFER_SIZE", "_TRACE_BUFFER_SIZE"))
    } == {name: "0"}


def test_torch_records_collectives_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    flight.record_collectives()
    assert int(os.environ.pop("TORCH_FR_BUFFER_SIZE")) > 0
