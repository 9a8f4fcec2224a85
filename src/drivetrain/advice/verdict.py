"""Find the cause of a slow fit in numbers that ``sampler.py`` has measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from drivetrain.advice.time_spent import Verdict
from drivetrain.errors import number_of

SHORTEST_S, FEWEST = 3.0, 20
"""The shortest training time in seconds, and the smallest number of measurements, for which there is a verdict."""

_FETCH, _SYNC, _LOG, _CHECKPOINT, _VALIDATION, _RANK, _CORES = 0.3, 0.2, 0.2, 0.2, 0.4, 0.15, 0.3
"""Thresholds: a cause is named if its time is at least this fraction of the training time. For _RANK, the time is the
additional time of one rank, compared with the other ranks.
"""

_PER_BATCH_S = 0.001  # a part that takes less time per batch is ignored
_BUSY, _IDLE, _STEPS = 0.9, 0.5, 0.7
"""Fractions of the training time. A device that computes for at least _BUSY counts as always busy. A device that
computes for less than _IDLE counts as waiting for the host, if the steps take at least _STEPS.
"""

_GROWTH, _GROWTH_BYTES, _STEADY = 0.1, 64 * 2**20, 0.3
"""Memory counts as growing if it grows by at least _GROWTH_BYTES, and by at least the fraction _GROWTH of its first
value. In addition, each half of the time must have at least the fraction _STEADY of the growth.
"""

_WAITS = re.compile(
    r"\.(item|tolist|numpy|cpu|nonzero|unique|equal|allclose|synchronize)\(|(?<![.\w])(float|int|bool|print)\("
    r"|\.to\(\s*[\"']cpu|^(if|elif|while|assert)\b([^(]*$|.*\b(any|all|isnan|isinf|isfinite)\()"
)
"""A pattern of source lines that make the host wait for a value on the device."""


@dataclass(frozen=True)
class Line:
    """A line of user code, and the time that the fit has spent in this line.

    Attributes:
        part: one of :data:`~drivetrain.advice.time_spent.PARTS`, or "collate" for the time of the part "fetch" that was
            spent in ``collate_fn``.
        place: file, line and function.
        source: the line.
    """

    part: str
    place: str
    source: str
    seconds: float


@dataclass(frozen=True)
class RankTimes:
    """The seconds for which one rank has waited for batches, and the seconds of its forward passes."""

    rank: int
    fetch_s: float
    forward_s: float


@dataclass(frozen=True)
class Measured:
    """The measurements of a fit.

    Attributes:
        seconds, wall_s: as in :class:`drivetrain.advice.time_spent.TimeSpent`.
        batches: the number of training batches.
        looks: the number of measurements during training.
        collate_s: the seconds of the part "fetch" that were spent in ``collate_fn``.
        workers_s: the seconds of the part "fetch" in which workers were started.
        num_workers, log_every: the training loader's ``num_workers``, and the Trainer's ``log_every_n_steps``.
        core_s: the seconds for which the training thread was ready to run, but waited for a CPU core.
        threads: the number of threads with which torch computes.
        on_host: whether the host itself computes, so that a step waits for no device.
        busy: the mean fraction of the time in which the device computed; ``None`` if it is unknown.
        memory: for "host" and "device", the bytes in use, measured at equal intervals.
        ranks: the times of the ranks of this machine, if there are several; only on rank 0.
    """

    seconds: Mapping[str, float]
    wall_s: float
    batches: int
    looks: int
    collate_s: float = 0.0
    workers_s: float = 0.0
    lines: Sequence[Line] = ()
    num_workers: int = 0
    log_every: int = 50
    core_s: float = 0.0
    threads: int = 1
    on_host: bool = False
    busy: float | None = None
    memory: Mapping[str, Sequence[float]] = field(default_factory=dict)
    ranks: Sequence[RankTimes] = ()

    @property
    def training_s(self) -> float:
        """The seconds since the first batch."""
        return self.wall_s - self.seconds["start"] - self.seconds["restart"]

    def of(self, seconds: float) -> str:
        """Return a text such as "20% of the 60 s of training" for ``seconds``."""
        return f"{seconds / self.training_s:.0%} of the {self.training_s:.0f} s of training"

    def line(self, part: str) -> Line | None:
        """Return the line of user code in which ``part`` has spent the most time."""
        return max((each for each in self.lines if each.part == part), key=lambda each: each.seconds, default=None)


def judge(measured: Measured) -> Verdict | None:
    """Return the verdict with the cause that costs the most time; ``None`` if no cause was found, or too little was
    measured.
    """
    if measured.training_s < SHORTEST_S or measured.looks < FEWEST or not measured.batches:
        return None
    found = max(_causes(measured), key=lambda each: each[0], default=None)
    return None if found is None else found[1]


def _causes(measured: Measured) -> Iterator[tuple[float, Verdict]]:
    """Yield pairs: the fraction of the training time that a cause costs, and the verdict with this cause."""
    of_ranks = list(_ranks(measured))
    yield from of_ranks
    # if the device is always busy, the host's waits cost no time
    if measured.busy is None or measured.busy < _BUSY:
        if not of_ranks:
            yield from _fetch(measured)
        yield from _cores(measured)
        yield from _sync(measured)
        yield from _launch(measured)
        if measured.seconds["log"] >= _PER_BATCH_S * measured.batches:
            text = f"Logging takes {{}}, with log_every_n_steps={measured.log_every}."
            advice = f"Write Trainer(log_every_n_steps={max(50, 10 * measured.log_every)})."
            yield from _part(measured, "log", _LOG, text, advice)
    advice = (
        'Write ModelCheckpoint(every="auto"), which measures what a save costs, or save less often (every_n_epochs, '
        "every_n_train_steps), or in the background: Trainer(plugins=AsyncCheckpointIO())."
    )
    yield from _part(measured, "checkpoint", _CHECKPOINT, "The fit waits for checkpoints in {}.", advice)
    advice = "Write Trainer(check_val_every_n_epoch=5), a larger val_check_interval, or limit_val_batches."
    yield from _part(measured, "validation", _VALIDATION, "Validation takes {}.", advice)
    yield from _memory(measured)


def _ranks(measured: Measured) -> Iterator[tuple[float, Verdict]]:
    if len(measured.ranks) < 2:
        return
    kinds = (
        ("rank_data", "fetch_s", "waited {0:.1f} s for batches", "reads its data",
         "Compare what it reads, and the disk or the network that it reads from, with the other ranks."),
        ("rank_compute", "forward_s", "spent {0:.1f} s in forward passes", "computes",
         "Compare its batches (longer sequences?), its device and what else runs there with the other ranks."),
    )  # fmt: skip
    for cause, name, did, does, advice in kinds:
        slowest = max(measured.ranks, key=lambda each: getattr(each, name))
        seconds = getattr(slowest, name)
        others = median(getattr(each, name) for each in measured.ranks if each is not slowest)
        if (share := (seconds - others) / measured.training_s) >= _RANK:
            text = (
                f"Rank {slowest.rank} {does} slower than the others, which wait for it: it {did.format(seconds)}, and "
                f"the median of the others is {others:.1f} s, in {measured.training_s:.0f} s of training."
            )
            yield share, Verdict(cause, text, advice)


def _fetch(measured: Measured) -> Iterator[tuple[float, Verdict]]:
    seconds, workers = measured.seconds["fetch"], measured.num_workers
    some = number_of(workers, "worker")
    if seconds < _FETCH * measured.training_s or seconds < _PER_BATCH_S * measured.batches:
        return
    text = f"The fit waits for batches in {measured.of(seconds)}, {_per_batch(measured, seconds)}"
    collates = measured.collate_s > seconds / 2
    line = measured.line("collate" if collates else "fetch")
    at = f" ({line.place})" if line is not None else ""
    share = seconds / measured.training_s
    if collates:
        advice = (
            "Write DataLoader(..., num_workers=2), or more, or let collate_fn work on the stacked batch instead of on "
            "each sample."
        )
        yield share, Verdict("collate", f"{text}, most of it in collate_fn{at}.", advice)
    elif measured.workers_s > seconds / 4:  # starting workers takes long
        advice = "Write DataLoader(..., persistent_workers=True), or fewer workers, or longer epochs."
        yield share, Verdict("dataset", f"{text}: {some} are started again in each epoch.", advice)
    elif workers:
        advice = f"Write DataLoader(..., num_workers={2 * workers}), or do less work for each sample."
        yield share, Verdict("dataset", f"{text}: {some} cannot read the data set faster.", advice)
    else:
        advice = "Write DataLoader(..., num_workers=2), or more, or do this work once, before the fit."
        yield share, Verdict("dataset", f"{text}: the data set is read in the process that trains{at}.", advice)


def _cores(measured: Measured) -> Iterator[tuple[float, Verdict]]:
    if measured.core_s < _CORES * measured.training_s:
        return
    text = (
        f"The thread that trains is ready to run and waits for a CPU core in {measured.of(measured.core_s)}: more "
        "threads are busy on this machine than it has cores."
    )
    fewer = f"Write torch.set_num_threads(1), because torch computes with {measured.threads} threads; or end"
    end = "End" if measured.threads == 1 else fewer
    advice = f"{end} other programs that compute, or write DataLoader(..., num_workers=0) if there are workers."
    yield measured.core_s / measured.training_s, Verdict("cores", text, advice)


def _sync(measured: Measured) -> Iterator[tuple[float, Verdict]]:
    waiting = [each for each in measured.lines if each.part == "forward" and _WAITS.search(each.source)]
    line = max(waiting, key=lambda each: each.seconds, default=None)
    if (
        measured.on_host
        or line is None
        or line.seconds < max(_SYNC * measured.training_s, _PER_BATCH_S * measured.batches)
    ):
        return
    text = f"A step waits for the device in {measured.of(line.seconds)}, at {line.place}: {line.source}"
    advice = (
        "Leave the value on the device there: self.log takes tensors and reads them together, and torch.where replaces "
        "an if."
    )
    yield line.seconds / measured.training_s, Verdict("sync", f"{text}.", advice)


def _launch(measured: Measured) -> Iterator[tuple[float, Verdict]]:
    seconds = sum(measured.seconds[each] for each in ("forward", "backward", "optimizer"))
    if measured.busy is None or measured.busy >= _IDLE or seconds < _STEPS * measured.training_s:
        return
    text = (
        f"The device computes for {measured.busy:.0%} of the time and waits for the host, which spends "
        f"{measured.of(seconds)} starting operations, {_per_batch(measured, seconds)}."
    )
    advice = "Write Trainer(compile=True), or cuda_graphs=True, or use larger batches."
    yield min(1 - measured.busy, seconds / measured.training_s), Verdict("launch", text, advice)


def _part(measured: Measured, part: str, least: float, text: str, advice: str) -> Iterator[tuple[float, Verdict]]:
    """Yield ``part`` as a cause, if it takes at least the fraction ``least`` of the training time."""
    if (seconds := measured.seconds[part]) >= least * measured.training_s:
        yield seconds / measured.training_s, Verdict(part, text.format(measured.of(seconds)), advice)


def _memory(measured: Measured) -> Iterator[tuple[float, Verdict]]:
    for where, curve in measured.memory.items():
        # leave out the first fifth, because the first steps allocate memory that later steps use again
        later = curve[len(curve) // 5 :]
        if len(later) < 4:
            continue
        first, middle, last = later[0], later[len(later) // 2], later[-1]
        growth = last - first
        steady = min(middle - first, last - middle) >= _STEADY * growth
        if growth >= max(_GROWTH_BYTES, _GROWTH * first) and steady:
            text = (
                f"The memory of the {where} grows from {first / 2**30:.2f} to {last / 2**30:.2f} GiB, by about "
                f"{growth / measured.batches / 2**20 / 0.8:.2g} MiB a batch."
            )
            advice = (
                "Keep no tensor of a step, whose graph it holds: append loss.detach() to a list, and clear the "
                "list after each epoch. If a cache grows on purpose, nothing is wrong."
            )
            # 0.0: this cause is named only if there is no other cause
            yield 0.0, Verdict("memory", text, advice)


def _per_batch(measured: Measured, seconds: float) -> str:
    return f"{1000 * seconds / measured.batches:.1f} ms a batch"
