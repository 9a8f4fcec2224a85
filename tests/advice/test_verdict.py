"""The cause of a slow fit, from numbers: thresholds, what is worth a change, and which of two causes is named."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.advice.time_spent import CAUSES, PARTS
from drivetrain.advice.verdict import Line, Measured, RankTimes, judge

MIB = float(2**20)


def fit(**parts: float) -> Any:
    """A function that measures a fit of 100 s of training: in the given parts, and else in backward passes."""
    seconds = {**dict.fromkeys(PARTS, 0.0), "start": 7.0, **parts}
    seconds["backward"] += 100 - sum(seconds.values()) + seconds["start"]
    return lambda **facts: Measured(**{"seconds": seconds, "wall_s": 107.0, "batches": 1000, "looks": 500, **facts})


def cause(measured: Measured) -> str | None:
    found = judge(measured)
    return None if found is None else found.cause


ITEM = Line("forward", "train.py:12 in training_step", "seen = loss.item()", 40.0)
GROWING = [500 * MIB + 10 * MIB * number for number in range(50)]
CASES = {
    "dataset": fit(fetch=50.0)(),
    "collate": fit(fetch=50.0)(collate_s=30.0, lines=[Line("collate", "data.py:3 in pad", "pad(each)", 30.0)]),
    "rank_data": fit()(ranks=[RankTimes(0, 1.0, 30.0), RankTimes(1, 40.0, 31.0), RankTimes(2, 1.0, 30.0)]),
    "rank_compute": fit()(ranks=[RankTimes(0, 1.0, 30.0), RankTimes(1, 1.0, 55.0)]),
    "cores": fit()(core_s=60.0, threads=2),
    "sync": fit(forward=50.0)(lines=[ITEM]),
    "launch": fit(forward=50.0)(busy=0.2),
    "checkpoint": fit(checkpoint=30.0)(),
    "validation": fit(validation=60.0)(),
    "log": fit(log=30.0)(log_every=1),
    "memory": fit()(memory={"host": GROWING}),
}


@pytest.mark.parametrize("expected", CAUSES)
def test_each_cause_is_named_with_its_evidence_and_what_to_write(expected: str) -> None:
    found = judge(CASES[expected])
    assert found is not None
    assert found.cause == expected
    assert any(digit.isdigit() for digit in found.text)
    assert found.text.endswith(".")
    assert found.advice.endswith(".")
    assert str(found) == f"{found.text} {found.advice}"


def test_every_cause_has_a_case() -> None:
    assert tuple(CASES) == CAUSES


@pytest.mark.parametrize(
    "measured",
    [
        fit()(), fit(fetch=29.0)(), fit(log=19.0)(), fit(checkpoint=19.0)(), fit(validation=39.0)(),
        fit(forward=50.0)(lines=[ITEM], on_host=True),
        fit(forward=50.0)(lines=[Line("forward", "model.py:3 in forward", "x = x.float() @ self.weight", 40.0)]),
        fit(forward=50.0)(busy=None), fit(forward=50.0)(busy=0.6), fit(validation=35.0)(busy=0.2),
        fit(fetch=50.0)(batches=1_000_000), fit(log=50.0)(batches=1_000_000),
        fit()(ranks=[RankTimes(0, 10.0, 30.0), RankTimes(1, 12.0, 40.0)]), fit()(ranks=[RankTimes(0, 90.0, 90.0)]),
        fit()(memory={"host": [500 * MIB + 10 * MIB * min(number, 25) for number in range(50)]}),
        fit()(memory={"host": [500 * MIB + MIB * number for number in range(50)], "device": []}),
        fit()(core_s=29.0, threads=8), fit()(core_s=60.0, busy=0.95),
        fit(fetch=50.0)(looks=10), fit(fetch=50.0)(batches=0),
    ],
    ids=[
        "backward", "little fetch", "little log", "few checkpoints", "little validation", "a read on the host",
        "a line that reads nothing", "unknown utilization", "a busy device", "a device idle during validation",
        "1 million batches fetched", "1 million batches logged", "similar ranks", "one rank", "memory that levels off",
        "little growth", "a little wait for a core", "a busy device of a busy host", "few looks", "no batch",
    ],
)  # fmt: skip
def test_a_healthy_fit_has_no_verdict(measured: Measured) -> None:
    assert judge(measured) is None


def test_a_short_fit_has_none() -> None:
    seconds = {**dict.fromkeys(PARTS, 0.0), "start": 60.0, "fetch": 2.9}
    assert judge(Measured(seconds, 62.9, batches=100, looks=100)) is None
    assert cause(Measured({**seconds, "fetch": 3.1}, 63.1, batches=100, looks=100)) == "dataset"


def test_what_happens_while_the_device_computes_costs_nothing() -> None:
    busy = fit(fetch=40.0, log=25.0, forward=30.0)(busy=0.97, lines=[ITEM])
    assert judge(busy) is None
    assert cause(fit(checkpoint=30.0, validation=20.0)(busy=0.97)) == "checkpoint"


def test_the_cause_that_costs_most_is_named() -> None:
    assert cause(fit(fetch=31.0, checkpoint=33.0)()) == "checkpoint"
    assert cause(fit(fetch=33.0, checkpoint=31.0)()) == "dataset"
    assert cause(fit(checkpoint=21.0)(memory={"host": GROWING})) == "checkpoint"


def test_one_rank_with_slow_data_is_not_a_slow_data_set() -> None:
    ranks = [RankTimes(0, 50.0, 10.0), RankTimes(1, 1.0, 10.0)]
    found = judge(fit(fetch=50.0)(ranks=ranks))
    assert found is not None
    assert found.cause == "rank_data"
    assert found.text.startswith("Rank 0 reads its data slower")
    assert cause(fit(fetch=50.0)(ranks=[RankTimes(0, 50.0, 10.0), RankTimes(1, 49.0, 10.0)])) == "dataset"


def test_the_advice_depends_on_the_workers() -> None:
    none, some = judge(fit(fetch=50.0)()), judge(fit(fetch=50.0)(num_workers=3))
    assert none is not None
    assert some is not None
    assert "num_workers=2" in none.advice
    assert "num_workers=6" in some.advice
    assert "3 workers" in some.text
    restarted = judge(fit(fetch=50.0)(num_workers=3, workers_s=20.0))
    assert restarted is not None
    assert "persistent_workers=True" in restarted.advice


@pytest.mark.parametrize(
    ("source", "waits"),
    [
        ("total += loss.item()", True), ("if loss > self.best:", True), ("seen.append(float(loss))", True),
        ('x = y.to("cpu")', True), ("print(loss)", True), ("values = out.tolist()", True),
        ("assert loss < 100", True), ("if torch.isnan(loss).any():", True),
        ("x = y.float()", False), ("if self.step(x):", False), ("self.print(1)", False),
        ("return self.net(x)", False), ("loss = F.mse_loss(x, y)", False),
    ],
)  # fmt: skip
def test_which_lines_wait_for_the_device(source: str, waits: bool) -> None:
    line = Line("forward", "train.py:12 in training_step", source, 40.0)
    assert cause(fit(forward=50.0)(lines=[line])) == ("sync" if waits else None)


@pytest.mark.parametrize(
    ("threads", "writes"), [(1, "End other programs"), (8, "Write torch.set_num_threads(1), because")]
)
def test_fewer_threads_are_advised_where_torch_has_more_than_one(threads: int, writes: str) -> None:
    found = judge(fit()(core_s=60.0, threads=threads))
    assert found is not None
    assert found.text.startswith("The thread that trains is ready to run and waits for a CPU core in 60% of the 100 s")
    assert found.advice.startswith(writes)
