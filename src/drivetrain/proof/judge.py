"""Compare the records of two runs of a program: an undisturbed run, and a run that was killed and restarted."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from drivetrain.proof.records import Start, Step, packed, unpacked

_WEIGHTS = {"parameters": 20, "optimizer": 6, "inputs": 3, "losses": 2, "hyperparameters": 1, "Python": 1, "torch": 1}
"""The weights of a record's parts. To find the step at which a program continued, the search compares two records, and
adds up the weights of the equal parts.
"""
_UNTRAINED = 4
"""The weight of equal parameters that are still the parameters of the first step. This weight is lower, because a
program that restores nothing also has these parameters.
"""
_FOLLOWING = 50
"""The largest number of steps that are compared to find the step at which a program continued."""
OF_TIME = re.compile(r"time|second|speed|_per_|/s\b|throughput|memory|flops|util|\beta\b", re.IGNORECASE)
"""Matches the names of logged values that measure the machine instead of the training."""

LOGGED, WRITTEN = "logged row", "file"
"""Two values of :attr:`Difference.part`. The first is for a value passed to a logger, the second for a file that the
program has written.
"""


class Difference(NamedTuple):
    """One part of a recorded step that differs between two runs, or between two ranks.

    Attributes:
        step: the optimizer step of the undisturbed run, counted from 1. A number after the last step means the state at
            the end of the run.
        part: the name of the part of the state that differs.
        detail: the name of the tensor or value that differs. If both values are short, the text also contains the
            values.
        rank: the rank.
    """

    step: int
    part: str
    detail: str
    rank: int = 0


@dataclass
class Judgement:
    """The result of the comparison of one rank.

    Attributes:
        differences: the parts that differ at the first unequal step, causes before effects.
        equal: the parts that are equal at this step.
        started_at: for each start of the process, the step of the undisturbed run at which the process continued,
            counted from 1; ``None``: the process made no step.
        ended_in: for each start of the process, the step in which the process ended.
        start: the number of the start that contains the difference. The first start has number 0.
        rank: the rank that is judged.
        notes: texts about differences that have no effect on any compared part.
        against: if two ranks of one run are compared, the rank with which ``rank`` was compared; ``None``: ``rank`` was
            compared with the same rank of the undisturbed run.
        tensor: if two ranks are compared, the part and the name of the first tensor that differs.
    """

    differences: list[Difference] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    started_at: list[int | None] = field(default_factory=list)
    ended_in: list[int | None] = field(default_factory=list)
    start: int = 0
    rank: int = 0
    notes: list[str] = field(default_factory=list)
    against: int | None = None
    tensor: str = ""

    @property
    def kills(self) -> list[tuple[int | None, int | None]]:
        """A pair of steps for each restart: the last step before the restart, and the step at which the program
        continued.
        """
        return list(zip(self.ended_in, self.started_at[1:], strict=False))


def earliest(found: Sequence[Judgement]) -> Judgement:
    """Return the judgement with the earliest difference. If several judgements first differ at the same step, return
    the judgement whose differing part is nearest to the cause.

    If no rank differs, return the judgement of the first rank.
    """
    differing = [each for each in found if each.differences]

    def order(each: Judgement) -> tuple[int, int, int]:
        first = each.differences[0]
        return each.start, first.step, _ORDER.index(first.part) if first.part in _ORDER else len(_ORDER)

    return min(differing, key=order) if differing else found[0]


def position(steps: Sequence[Step], undisturbed: Sequence[Step], latest: int, ends: bool = False) -> int:
    """Return the index in ``undisturbed`` of the step that is equal or most similar to the first of ``steps``.

    Steps in which the model does not change can be equal to each other. Among equal steps, prefer a step up to
    ``latest``. Then prefer a step that is followed by more equal steps.

    Args:
        steps: the records of a process.
        undisturbed: the steps of the undisturbed run.
        latest: the latest step at which the program can have continued. The last kill was in the step before.
        ends: whether the process has ended by itself.
    """
    own, others = [_signature(step) for step in steps[:_FOLLOWING]], [_signature(step) for step in undisturbed]

    weights = {**_WEIGHTS, **({"parameters": _UNTRAINED} if own[0]["parameters"] == others[0]["parameters"] else {})}

    def likeness(number: int) -> int:
        return sum(weights[part] for part, value in own[0].items() if value and value == others[number][part])

    def fit(number: int) -> tuple[bool, bool, int, int]:
        pairs = zip(own, others[number:], strict=False)
        follow = sum(all(a[part] == b[part] for part in a if part not in ("Python", "torch")) for a, b in pairs)
        return number <= latest, ends and number + len(steps) == len(others), follow, number

    likely = [likeness(number) for number in range(len(others))]
    return max((number for number, value in enumerate(likely) if value == max(likely)), key=fit)


def _signature(step: Step) -> dict[str, Any]:
    last = {part: each[-1:] for part, each in step["since"].items()}
    return {
        **{part: step["tensors"][part] for part in ("parameters", "optimizer")},
        **{part: last[part] for part in ("inputs", "losses")},
        "hyperparameters": step["values"]["hyperparameters"],
        **{part: step["random"][part] for part in ("Python", "torch")},
    }


def judge(
    undisturbed: Start, starts: Sequence[Start], rank: int = 0, ignored: Iterable[str] = (), resumes: bool = True
) -> Judgement:
    """Compare each step of ``starts`` with the same step of the undisturbed run.

    Args:
        undisturbed: the records of the undisturbed run.
        starts: the records of the run that was killed, in order.
        rank: the rank that has written all of these records; used only in messages.
        ignored: names of logged values that differ between two undisturbed runs.
        resumes: whether a process may have resumed at any step. If False, the process began at the first step.
    """
    found = Judgement(rank=rank)
    silent: dict[str, int] = {}  # for each random generator that differs, the first step at which it differed
    unseeded = _unequal(undisturbed.steps[0]["random"], starts[0].steps[0]["random"]) if starts[0].steps else []
    latest = 0
    for start in starts:
        ends = start.end is not None
        first = position(start.steps, undisturbed.steps, latest, ends) if start.steps and resumes else 0
        latest = first + len(start.steps) if start.steps else latest
        found.started_at.append(first + 1 if start.steps else None)
        found.ended_in.append(latest if start.steps else None)
    for number, (began_at, start) in enumerate(zip(found.started_at, starts, strict=True)):
        if began_at is None:
            continue
        first = began_at - 1
        for place, (there, here) in enumerate(_pairs(undisturbed, start, first)):
            differing = list(_differences(there, here, undisturbed, is_first=place == 0))
            for name in _unequal(there["random"], here["random"]):
                if name not in unseeded:
                    silent.setdefault(name, first + place + 1)
            if differing:
                found.start = number
                found.differences = [Difference(first + place + 1, *each, rank) for each in differing]
                _add_random(found, silent)
                found.equal = _equal_parts(there, here)
                return found
        made, all_steps = first + len(start.steps), len(undisturbed.steps)
        ended = start.end is not None or not resumes
        if made > all_steps or (ended and made < all_steps):
            found.start = number
            text = f"the program ends after step {made}" if ended else f"the program goes on after step {all_steps}"
            step = min(made, all_steps) + 1
            found.differences = [Difference(step, "number of steps", f"{text}, undisturbed after {all_steps}", rank)]
            return found
    found.differences = list(_rows(undisturbed, starts, rank, set(ignored)))
    found.notes += [
        f"the random state of {name} differs from step {step} on; no number that was compared depends on it"
        for name, step in silent.items()
    ]
    return found


def judge_ranks(one: Start, other: Start, against: int, rank: int) -> Judgement:
    """Compare the parts of the state that must be equal on two ranks of one run: parameters, optimizer state, buffers
    and reduced gradients.

    Batch, loss and random state may differ. Buffers that each rank computes from its own batches may also differ.
    Tensors that exist on only one rank are not compared, such as the optimizer state that ``ZeroRedundancyOptimizer``
    divides among the ranks.

    Args:
        one: the records of rank ``against``.
        other: the records of rank ``rank``.
    """
    found, own = Judgement(rank=rank, against=against), _own_buffers(one.steps, other.steps)
    if own:
        found.notes = [f"not compared, because each rank computes it from its own batches: {', '.join(sorted(own))}"]
    for number, (there, here) in enumerate(_pairs(one, other, 0), 1):
        was, now = _shared(there, here, own), _shared(here, there, own)
        all_parts = _differences(was, now, one, is_first=False)
        if differing := [each for each in all_parts if each[0] in _OF_ALL_RANKS]:
            found.differences, found.equal = [Difference(number, *each) for each in differing], _equal_parts(was, now)
            unequal = (
                f"{part}: {name}"
                for part in _WORDS
                if was["names"][part] == now["names"][part]
                for name in _unequal_names(was["names"][part], was["tensors"][part], now["tensors"][part])
            )
            found.tensor = next(unequal, "")
            return found
    counts = [len(each.steps) for each in (one, other)]
    if counts[0] != counts[1]:
        text = f"rank {against} makes {counts[0]}, rank {rank} makes {counts[1]}"
        found.differences = [Difference(min(counts) + 1, "number of steps", text)]
    return found


def _own_buffers(one: Sequence[Step], other: Sequence[Step]) -> set[str]:
    """Return the buffers that each rank computes from its own batches, such as the statistics of batch norm.

    The result contains each buffer that changes at each step on both ranks, and differs between the ranks after each
    change.
    """
    values = [
        tuple(dict(zip(step["names"]["model"], unpacked(step["tensors"]["model"]), strict=True)) for step in steps)
        for steps in zip(one, other, strict=False)
    ]
    own = set()
    for name in values[0][0].keys() & values[0][1].keys() if values[1:] else ():
        pairs = [(a.get(name), b.get(name)) for a, b in values]
        first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None and not any(
            a == b and a != c for (a, b), (c, _) in zip(pairs[1:first], pairs, strict=False)
        ):
            near = pairs[first + 1 if first + 1 < len(pairs) else first - 1]
            if all(a != b for a, b in zip(pairs[first], near, strict=True)):
                own.add(name)
    return own


def _shared(step: Step, other: Step, own: set[str]) -> Step:
    """Return ``step`` without the buffers ``own``, and without tensors that the other rank does not have."""
    lacking = set(step["names"]["parameters"]) ^ set(other["names"]["parameters"])
    lacking |= own | (set(step["names"]["optimizer"]) ^ set(other["names"]["optimizer"]))
    names, tensors = dict(step["names"]), dict(step["tensors"])
    for part in _WORDS:
        pairs = zip(names[part], unpacked(tensors[part]), strict=True)
        kept = {name: value for name, value in pairs if name not in lacking}
        names[part], tensors[part] = list(kept), packed(list(kept.values()))
    return {**step, "names": names, "tensors": tensors}


def _pairs(undisturbed: Start, start: Start, first: int) -> Iterator[tuple[Step, Step]]:
    """Yield pairs: each step of the undisturbed run, from ``first`` on, and the same step of ``start``. At the end,
    yield the two final states.
    """
    yield from zip(undisturbed.steps[first:], start.steps, strict=False)
    if start.end and undisturbed.end and first + len(start.steps) == len(undisturbed.steps):
        yield undisturbed.end, start.end


def _add_random(found: Judgement, silent: dict[str, int]) -> None:
    """Insert the differing random states into ``differences``, before the differences that random states can cause."""
    step = found.differences[0].step
    states = [
        Difference(step, "random state", f"of {name}, since step {since}", found.differences[0].rank)
        for name, since in silent.items()
    ]
    effects = _ORDER[_ORDER.index("random state") :]
    place = next((n for n, each in enumerate(found.differences) if each.part in effects), len(found.differences))
    found.differences[place:place] = states


def _differences(there: Step, here: Step, undisturbed: Start, is_first: bool) -> Iterator[tuple[str, str]]:
    """Yield the name of each part that differs, and the detail of the difference. Causes come before effects."""
    untrained = here["tensors"]["parameters"] == undisturbed.steps[0]["tensors"]["parameters"]
    for part, since in (("parameters", ", those of step 1" if untrained else ""), ("optimizer", "")):
        yield from ((words, detail + since) for words, detail in _tensors(part, there, here))
    old, new = there["values"], here["values"]
    if unequal := _unequal(old["hyperparameters"], new["hyperparameters"]):
        was, now = old["hyperparameters"][unequal[0]], new["hyperparameters"][unequal[0]]
        yield "hyperparameter", f"{unequal[0]}: {now!r} instead of {was!r}"
    if old["scaler"] and new["scaler"] and old["scaler"] != new["scaler"]:
        pairs = zip(old["scaler"], new["scaler"], strict=False)
        name, was, now = next((key, a[key], b.get(key)) for a, b in pairs for key in a if a[key] != b.get(key))
        yield "gradient scaler", f"{name}: {now!r} instead of {was!r}"
    yield from _others(there, here)
    inputs_differ = _lists_differ(there, here, "inputs", is_first)
    has_inputs = there["since"]["inputs"] or here["since"]["inputs"]
    batches_differ = _lists_differ(there, here, "batches", True)
    if inputs_differ or (not has_inputs and batches_differ):
        names = (["inputs"] if has_inputs else []) + (["batches"] if batches_differ else [])
        yield "batch" if batches_differ else "inputs of the model", _whence(names, there, here, undisturbed)
    yield from _tensors("model", there, here)
    if old["scaler"] == new["scaler"] and _lists_differ(there, here, "losses", is_first):
        was, now = ([None], *there["since"]["losses"])[-1], ([None], *here["since"]["losses"])[-1]
        yield "loss", "" if was[0] == now[0] else f"{now[0]!r} instead of {was[0]!r}"
    yield from _tensors("gradients", there, here)


_WORDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "model": "buffers and frozen parameters",
    "gradients": "gradients",
}


_ORDER = (
    "parameters", "optimizer state", "hyperparameter", "gradient scaler", "batch", "inputs of the model",
    "random state", "buffers and frozen parameters", "loss", "gradients",
)  # fmt: skip


_OF_ALL_RANKS = {*_WORDS.values(), "hyperparameter", "gradient scaler"}
"""The parts that must be equal on all ranks with a copy of the model."""


def _equal_parts(there: Step, here: Step) -> list[str]:
    equal = [words for part, words in _WORDS.items() if there["tensors"][part] == here["tensors"][part] != ""]
    for part, name in (("batch", "inputs"), ("loss", "losses")):
        is_known = there["since"][name] and here["since"][name]
        equal += [part] if is_known and not _lists_differ(there, here, name, True) else []
    return equal + ([] if _unequal(there["random"], here["random"]) else ["random state"])


def _tensors(part: str, there: Step, here: Step) -> Iterator[tuple[str, str]]:
    was, now = there["tensors"][part], here["tensors"][part]
    if was != now:
        yield _WORDS[part], _first_tensor(was, now, there["names"][part], here["names"][part])


def _unequal_names(names: list[str], was: str, now: str) -> list[str]:
    return [name for name, a, b in zip(names, unpacked(was), unpacked(now), strict=True) if a != b]


def _first_tensor(was: str, now: str, names: list[str], own_names: list[str]) -> str:
    """Return a text with the name of the first tensor that differs, and the number of tensors that differ."""
    old, new = unpacked(was), unpacked(now)
    if names != own_names:
        lost, added = ([each for each in a if each not in b] for a, b in ((names, own_names), (own_names, names)))
        if lost and len(lost) == len(added):
            return f"{added[0]!r} in place of {lost[0]!r}{_and_more(lost, old)}"
        which = f", without {lost[0]!r}" if lost else f", with {added[0]!r}" if added else ", in another order"
        return f"{len(new)} tensor{'s' * (len(new) != 1)} instead of {len(old)}{which}"
    differing = _unequal_names(names, was, now)
    return f"{differing[0]!r}{_and_more(differing, old)}" + (
        ", with each other's values" if sorted(old) == sorted(new) else ""
    )


def _and_more(differing: Sequence[str], everything: Sequence[int]) -> str:
    return f" and {len(differing) - 1} more of {len(everything)}" if differing[1:] else ""


def _others(there: Step, here: Step) -> Iterator[tuple[str, str]]:
    """Compare the modules that the optimizer does not train, such as averaged weights. Modules are matched by class and
    size, because the order of the modules may differ.
    """
    old, new = _by_class(there["others"]), _by_class(here["others"])
    for kind, size in old.keys() & new.keys():
        lost, added = (a[kind, size] - b[kind, size] for a, b in ((old, new), (new, old)))
        if lost and added:
            was, now = next(iter(lost)), next(iter(added))
            names = (step["names"][f"module {kind} {len(unpacked(was))}"] for step in (there, here))
            detail = _first_tensor(was, now, *names)
            yield f"a module {kind} that the optimizer does not train", detail


def _by_class(others: list[list[str]]) -> dict[tuple[str, int], Counter[str]]:
    found: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for kind, tensors in others:
        found[kind, len(tensors)][tensors] += 1
    return found


def _lists_differ(there: Step, here: Step, name: str, is_first: bool) -> bool:
    """Whether the inputs, batches or losses (``name``) since the last optimizer step differ between two records. After
    a restart, the list of the first step can be longer or shorter than without the restart. If ``is_first``, only the
    last items of both lists are therefore compared.
    """
    was, now = there["since"][name], here["since"][name]
    if is_first:
        common = min(len(was), len(now))
        was, now = was[len(was) - common :], now[len(now) - common :]
    return repr(was) != repr(now)  # repr, because NaN is not equal to NaN


def _whence(names: Sequence[str], there: Step, here: Step, undisturbed: Start) -> str:
    """Find the last batch of ``here`` that differs from the batch of ``there``. Return a text that names the step of
    the undisturbed run that used this batch.
    """
    for name in names:
        pairs = zip(reversed(there["since"][name]), reversed(here["since"][name]), strict=False)
        other = next((now for was, now in pairs if was != now), None)
        if steps := [n + 1 for n, each in enumerate(undisturbed.steps) if other in each["since"][name]]:
            return f"that of step {steps[0]}"
    return "one that the undisturbed run never had"


def _unequal(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name in old if name in new and repr(old[name]) != repr(new[name])]


def _rows(undisturbed: Start, starts: Sequence[Start], rank: int, ignored: set[str]) -> Iterator[Difference]:
    """Yield differences of logged values with the same name and step. A value that is logged again after a restart must
    also be equal.
    """
    expected: dict[tuple[str, Any], list[str]] = defaultdict(list)
    steps: dict[tuple[str, str], Any] = {}
    for name, value, step in undisturbed.rows:
        expected[name, step].append(repr(value))
        steps.setdefault((name, repr(value)), step)
    for name, value, step in (row for start in starts for row in start.rows):
        if name in ignored or OF_TIME.search(name) or step is None or repr(value) in expected.get((name, step), ()):
            continue
        if (name, repr(value)) in steps:
            text = f"{name!r} of step {steps[name, repr(value)]} is logged as that of step {step}"
        else:
            text = f"{name!r} of step {step}: {value!r} instead of {(expected.get((name, step)) or ['no value'])[0]}"
        yield Difference(int(step), LOGGED, text, rank)


def logged_apart(one: Start, other: Start) -> set[str]:
    """Return the names of logged values in which two undisturbed runs differ."""
    values = [{(name, step): repr(value) for name, value, step in run.rows} for run in (one, other)]
    names = {key[0] for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)}
    return {name for name in names if not OF_TIME.search(name)}


def summary(run: Start) -> str:
    """Return a hash of 16 characters over the tensors, hyperparameters, inputs and losses of all steps of a run.

    Random states are left out of the hash, because a program need not seed a generator that is never used.
    """
    kept = [
        [each["tensors"], each["values"], each["since"]["inputs"], each["since"]["losses"]]
        for each in [*run.steps, run.end]
        if each
    ]
    return hashlib.sha1(json.dumps(kept, sort_keys=True).encode(), usedforsecurity=False).hexdigest()[:16]
