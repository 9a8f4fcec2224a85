"""Write the torch operations of one step of a program to a file, and find the first operation that differs between two
of these files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from drivetrain.base import operations
from drivetrain.base.digest import digest, leaves
from drivetrain.base.operations import first_other, innermost_line
from drivetrain.base.torch_private import schema_of

Storages = dict[int, StorageWeakRef]
_OWN = os.path.dirname(__file__) + os.sep
_WRAPPERS = ("recorded_backward", "recorded_next")
"""The functions of this package through which the program calls torch."""


class Operations(operations.Operations):  # type: ignore[no-untyped-call]
    """Records torch's operations that the program calls, but not the operations that this package calls. For each
    operation, also records the storages that the operation has made or changed.
    """

    def __init__(self) -> None:
        super().__init__(_place)
        self._made: list[Storages] = []
        self._names: dict[int, list[str]] = {}

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, place: str) -> None:
        """Record an operation, with a fingerprint of the tensors that the operation has made or changed."""
        if "c10d" in str(func):  # no fingerprint: other ranks may still write to the result of a collective
            self.found.append((str(func), "", place))
            self._made.append(_storages((args, result)))
            return
        changed = _changed(func, args, kwargs)
        seen = list({id(each): each for each in leaves((result, changed))}.values())
        # a result with the storage of an argument is not new, but a view
        before = {} if changed else _storages((args, kwargs))
        self.found.append((str(func), digest(seen), place))
        self._made.append({key: ref for key, ref in _storages(seen).items() if key not in before})

    def name(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Store the names of the program's tensors, by part of the program's state. :meth:`write` writes these
        names.
        """
        self._names = {}
        for part, tensors in parts.items():
            for name, tensor in tensors.items():
                for key in _storages(tensor):
                    self._names.setdefault(key, []).append(f"{part}: {name}")

    def write(self, path: Path) -> None:
        """Write the recorded operations, for :func:`first_difference` and :func:`first_change`."""
        found = [
            (*each, [name for key in made for name in self._names.get(key, ())])
            for each, made in zip(self.found, self._made, strict=True)
        ]
        path.write_text(json.dumps(found), encoding="utf-8")


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    if not schema_of(func).is_mutable:
        return []
    names = [each.name for each in schema_of(func).arguments if each.is_write]
    given = {**{each.name: value for each, value in zip(schema_of(func).arguments, args, strict=False)}, **kwargs}
    return [given[name] for name in names if given.get(name) is not None]


def _storages(tree: Any) -> Storages:
    """Return a weak reference to each tensor's storage. The key is the address of the storage. While the weak reference
    exists, no other storage gets this address.
    """
    found: Storages = {}
    for each in leaves(tree):
        if isinstance(each, Tensor):
            with suppress(RuntimeError):  # sparse tensors have no storage
                ref = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
                found[ref.cdata] = ref
    return found


class _Recorder(Exception):
    """Raised if the recorder itself has called the operation, instead of the program."""


def _place(frame: Any) -> str | None:
    try:
        return innermost_line(_frames(frame))
    except _Recorder:
        return None


def _frames(frame: Any) -> Iterator[tuple[str, int]]:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) or name.endswith("child.py"):
            yield name, frame.f_lineno
        elif frame.f_code.co_name not in _WRAPPERS:
            raise _Recorder
        frame = frame.f_back


def first_difference(one: Path, other: Path, has_same_start: bool, has_same_torch: bool = True) -> str:
    """Return a text that names the first operation that differs between two recorded steps.

    Args:
        one: the file with the operations of the first run.
        other: the file of the second run.
        has_same_start: whether both records begin with the optimizer step before the recorded step. If False, one
            record can begin at the start of a process, and contain additional operations, for example the load of a
            checkpoint. The records are then compared backwards from their ends, as long as the operations have equal
            names.
        has_same_torch: whether both runs had the same version of torch. If not, the two versions may call different
            operations. An operation of only one run is then named only if all operations of both runs have equal
            results.
    """
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (one, other))
    if not has_same_start:
        count = 0
        while count < min(len(old), len(new)) and old[-1 - count][0] == new[-1 - count][0]:
            count += 1
        old, new = old[len(old) - count :], new[len(new) - count :]
    if not has_same_torch:
        keys = [[(name, place) for name, _, place, _ in each] for each in (old, new)]
        matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
        pairs = ((old[a + n], new[b + n]) for a, b, size in matcher.get_matching_blocks() for n in range(size))
        if now := next((now for was, now in pairs if was[1] != now[1]), None):
            return f"first operation with another result: {now[0]} in {now[2]}"
    if (index := first_other(old, new)) is None:
        return "no common operation has another result: what differs was read before, or only one run has the operation"
    name, _, place, _ = new[index]
    if old[index][0] != name:
        return f"first operation that the other run has not: {name} in {place}"
    return f"first operation with another result: {name} in {place}"


def first_change(one: Path, other: Path, ranks: tuple[int, int], tensor: str) -> str:
    """Return a text that names the first operation after which a tensor differs between two ranks.

    Most results differ between ranks, because the batches differ. The function therefore compares only operations that
    made or changed the tensor. The comparison begins after the last equal result of these operations.

    Args:
        one: the file with the operations of the first rank.
        other: the file of the second rank.
        ranks: both ranks.
        tensor: the part of the state and the name of the tensor, such as "parameters: layer.weight".
    """
    old, new = (
        [each for each in json.loads(path.read_text(encoding="utf-8")) if tensor in each[3]] for path in (one, other)
    )
    pairs = list(zip_longest(old, new))
    last = max((n for n, (was, now) in enumerate(pairs) if was and now and was[:2] == now[:2]), default=-1)
    if last + 1 == len(pairs):
        return f"no operation of this step has changed {tensor!r} in one rank only: it was set otherwise or before"
    was, now = pairs[last + 1]
    if was and now and was[0] == now[0]:
        unequal = "; no later one made it equal, as a reduction does" if last < 0 else ""
        return f"first operation with another result: {now[0]} in {now[2]}{unequal}"
    rank, extra = (ranks[1], now) if now and len(new) >= len(old) else (ranks[0], was)
    return f"first operation that only rank {rank} has: {extra[0]} in {extra[2]}"
